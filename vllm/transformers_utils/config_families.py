"""What each model family assumes where its config.json is silent.

Called by the config readers for HF directories and GGUF files. One row a family: the defaults of
its transformers config class (facts, checked against transformers by a test) and the function that
derives the rest, e.g. the type of every layer. Families without a row are left to transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.errors import ConfigError
from vllm.logger import init_logger, warn_once
from vllm.transformers_utils.rope_config import normalize_rope, normalize_rope_by_layer_type

logger = init_logger(__name__)

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family.

    Attributes:
        architecture: class name used when config.json has no `architectures`.
        defaults: values of missing keys (a key that is present, even as null, is kept).
        derive: fills in what depends on other keys; called after `defaults`.
    """

    architecture: str
    defaults: Mapping[str, Any]
    derive: Callable[[dict[str, Any]], None]
    aliases: tuple[str, ...] = field(default=())


def fill_heads(config: dict[str, Any]) -> None:
    """KV heads default to all heads, the head size to an even split of the hidden size."""
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    if config.get("head_dim") is None:
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]


def _fill_layer_types(config: dict[str, Any], is_sliding: Callable[[int], bool]) -> None:
    num_layers = config["num_hidden_layers"]
    given = config.get("layer_types")
    if given is None:
        config["layer_types"] = [SLIDING if is_sliding(i) else FULL for i in range(num_layers)]
    elif len(given) != num_layers:
        raise ConfigError(
            f"layer_types of the checkpoint's config names {len(given)} layers, but "
            f"num_hidden_layers is {num_layers}. Mend config.json."
        )


def _derive_dense(config: dict[str, Any]) -> None:
    fill_heads(config)
    normalize_rope(config)


def _derive_mixtral(config: dict[str, Any]) -> None:
    fill_heads(config)
    normalize_rope(config, default_theta=1_000_000.0)


def _derive_qwen(config: dict[str, Any]) -> None:
    """Qwen 2 and 3: full layers first, windows from `max_window_layers` on, if switched on."""
    fill_heads(config)
    if not config["use_sliding_window"]:
        config["sliding_window"] = None
    window, first = config["sliding_window"], config["max_window_layers"]
    _fill_layer_types(config, lambda i: window is not None and i >= first)
    normalize_rope(config)


def _derive_qwen2_moe(config: dict[str, Any]) -> None:
    """Windows on every other layer below `max_window_layers`, if switched on at all."""
    fill_heads(config)
    if config["mlp_only_layers"] is None:
        config["mlp_only_layers"] = []
    if not config["use_sliding_window"]:
        config["sliding_window"] = None
    window, end = config["sliding_window"], config["max_window_layers"]
    _fill_layer_types(config, lambda i: bool(window) and (i + 1) % 2 == 1 and i < end)
    normalize_rope(config)


def _derive_gemma(config: dict[str, Any]) -> None:
    # Early official files say "gelu" and mean the tanh form that the model was trained with.
    given = config.get("hidden_activation") or config.get("hidden_act")
    config["hidden_act"] = "gelu_pytorch_tanh" if given in (None, "gelu") else given
    config["hidden_activation"] = config["hidden_act"]
    fill_heads(config)
    normalize_rope(config)


def _derive_gemma2(config: dict[str, Any]) -> None:
    fill_heads(config)
    _fill_layer_types(config, lambda i: (i + 1) % 2 == 1)
    normalize_rope(config)


def _derive_gemma3(config: dict[str, Any]) -> None:
    fill_heads(config)
    pattern = config.pop("_sliding_window_pattern", None)
    pattern = config.pop("sliding_window_pattern", None) or pattern or 6
    _fill_layer_types(config, lambda i: (i + 1) % pattern != 0)
    if config.get("use_bidirectional_attention"):
        raise ConfigError(
            "use_bidirectional_attention is set: this is an encoder, not a causal language model."
        )
    normalize_rope_by_layer_type(config, full_theta=1_000_000.0, sliding_theta=10_000.0)


_COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MISTRAL: dict[str, Any] = {
    **_LLAMA,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_MIXTRAL: dict[str, Any] = {
    **_MISTRAL,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_QWEN2: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN2_MOE: dict[str, Any] = {
    **_QWEN2,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "qkv_bias": True,
}
_GEMMA: dict[str, Any] = {
    **{k: v for k, v in _COMMON.items() if k != "hidden_act"},
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_GEMMA2: dict[str, Any] = {
    **_GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3: dict[str, Any] = {
    **_GEMMA2,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}

# model_type -> family
FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        aliases=("LLaMAForCausalLM",),
        defaults=_LLAMA,
        derive=_derive_dense,
    ),
    "mistral": Family(architecture="MistralForCausalLM", defaults=_MISTRAL, derive=_derive_dense),
    "mixtral": Family(architecture="MixtralForCausalLM", defaults=_MIXTRAL, derive=_derive_mixtral),
    "qwen2": Family(architecture="Qwen2ForCausalLM", defaults=_QWEN2, derive=_derive_qwen),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults={**_QWEN2, "head_dim": 128, "attention_bias": False},
        derive=_derive_qwen,
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM", defaults=_QWEN2_MOE, derive=_derive_qwen2_moe
    ),
    "gemma": Family(architecture="GemmaForCausalLM", defaults=_GEMMA, derive=_derive_gemma),
    "gemma2": Family(architecture="Gemma2ForCausalLM", defaults=_GEMMA2, derive=_derive_gemma2),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM", defaults=_GEMMA3, derive=_derive_gemma3
    ),
}


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return the family that a raw config names by model_type, else by architecture, or None."""
    family = FAMILIES.get(str(config.get("model_type") or ""))
    if family is not None or config.get("model_type"):
        return family
    for name in config.get("architectures") or ():
        for candidate in FAMILIES.values():
            if name == candidate.architecture or name in candidate.aliases:
                return candidate
    return None


def apply_family(config: dict[str, Any], family: Family) -> None:
    """Fill in a family's defaults and derived keys, in place."""
    for key, value in family.defaults.items():
        config.setdefault(key, value)
    if not config.get("architectures"):
        warn_once(logger, f"config.json names no architectures; {family.architecture} is assumed.")
        config["architectures"] = [family.architecture]
    family.derive(config)
