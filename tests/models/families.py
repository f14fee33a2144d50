"""Tiny models of every family, random weights from a seed, as transformers models and as ours.

Each is small enough to run in milliseconds and odd enough to show mistakes: biases are not zero,
norms are not one, layer kinds alternate, windows are shorter than the prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.utils.fixtures_models import build_model
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.transformers_utils.config_families import apply_family, family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BASE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_QWEN = {k: v for k, v in _BASE.items() if k != "head_dim"} | {"hidden_size": 128}


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """One row of the table below.

    Attributes:
        model_type: transformers' name.
        config: what differs from its defaults.
    """

    model_type: str
    config: Mapping[str, Any]


def _row(model_type: str, base: Mapping[str, Any] = _BASE, **config: Any) -> TinyModel:
    return TinyModel(model_type=model_type, config={**base, **config})


FAMILIES: dict[str, TinyModel] = {
    "llama": _row("llama", tie_word_embeddings=False),
    "llama_tied_biased": _row(
        "llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, vocab_size=330
    ),
    "mistral_window": _row("mistral", sliding_window=20),
    "mistral_full": _row("mistral", sliding_window=None),
    "qwen2": _row("qwen2", _QWEN, tie_word_embeddings=True),
    "qwen2_window": _row(
        "qwen2", _QWEN, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen3": _row("qwen3"),
    "qwen3_biased_window": _row(
        "qwen3",
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=2,
    ),
    "gemma": _row("gemma", num_key_value_heads=1),
    "gemma2": _row(
        "gemma2",
        sliding_window=20,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": _row(
        "gemma3_text",
        num_hidden_layers=4,
        sliding_window=20,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
    "gemma3_scaled": _row(
        "gemma3_text",
        num_key_value_heads=1,
        sliding_window=32,
        query_pre_attn_scalar=32,
        sliding_window_pattern=3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        final_logit_softcapping=4.0,
    ),
    "mixtral": _row("mixtral", num_local_experts=6, num_experts_per_tok=2, intermediate_size=32),
    "qwen2_moe": _row(
        "qwen2_moe",
        _QWEN,
        num_hidden_layers=4,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        norm_topk_prob=False,
    ),
    "qwen2_moe_window": _row(
        "qwen2_moe",
        _QWEN,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=20,
        max_window_layers=2,
    ),
}


def make_reference(name: str) -> PreTrainedModel:
    """Build the transformers model of a row, every parameter random."""
    row = FAMILIES[name]
    return randomize(build_model(row.model_type, row.config))


def randomize(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Add N(0, 0.1) to the neutral value of every parameter: 1 for norms, 0 for the rest."""
    generator = torch.Generator().manual_seed(seed)
    is_gemma = model.config.model_type.startswith("gemma")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            is_one_centred = "norm" in name and not is_gemma
            parameter.copy_(noise + 1.0 if is_one_centred else noise)
    return model


def save_weights(model: PreTrainedModel, directory: Path) -> dict[str, Tensor]:
    """Return the tensors under the names that a checkpoint file has."""
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def read_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return the config as the engine sees it: what config.json holds, normalised."""
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    family = family_of(config)
    assert family is not None
    apply_family(config, family)
    return config


def load_ours(
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    tp: TensorParallel | None = None,
    max_model_len: int | None = None,
    is_fused: bool = True,
) -> CausalLM:
    """Build our model of a normalised config and load it."""
    cls, _ = ModelRegistry.resolve_model_cls(config["architectures"])
    model = cls(config, dtype=dtype, tp=tp or TensorParallel.single(), max_model_len=max_model_len)
    report = model.load_weights(weights.items())
    assert not report.unused, report.unused
    model.finish_loading(is_fused=is_fused)
    return model
