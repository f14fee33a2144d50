"""GGUF files of tiny models, written by the gguf package from Hugging Face tensors.

The way back of `vllm/model_executor/model_loader/gguf.py`, built on the package's own name tables,
so that the two are independent. `write_fx_gguf` is the FX-GGUF fixture of cases C34 and C35.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from tests.utils.fixtures_models import build_model, fill_matrices

F32 = gguf.GGMLQuantizationType.F32
FX_VOCAB, FX_BOS, FX_EOS = 320, 256, 257
_ARCH = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


def build_fx_model(**config: Any) -> Any:
    """The model of FX-GGUF: a Llama of two layers, tied, N(0, 0.08)."""
    base = {
        "vocab_size": FX_VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": FX_BOS,
        "eos_token_id": FX_EOS,
    }
    model = build_model("llama", base | config)
    fill_matrices(model)
    return model


def write_fx_gguf(
    path: Path,
    *,
    extra: Mapping[str, np.ndarray] | None = None,
    split_max_tensors: int = 0,
    metadata: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write FX-GGUF and return its path (of the first part, if it is split).

    Args:
        extra: tensors to add under their file names.
        split_max_tensors: tensors of one part; 0 writes one file.
        metadata: further keys, or other values of keys.
        **config: fields of the model that differ from the fixture's.
    """
    model = build_fx_model(**config)
    weights = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    return write_gguf(
        path,
        model.config.to_dict(),
        weights,
        extra=extra,
        split_max_tensors=split_max_tensors,
        metadata={**byte_vocabulary(FX_VOCAB), **(metadata or {})},
    )


def byte_vocabulary(size: int) -> dict[str, Any]:
    """Metadata of a vocabulary of 256 bytes, BOS 256, EOS 257 and placeholders."""
    letters = bytes_to_letters()
    tokens = [letters[byte] for byte in range(256)] + ["<s>", "</s>"]
    tokens += [f"<extra_{i}>" for i in range(len(tokens), size)]
    types = [1] * 256 + [3, 3] + [5] * (size - 258)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b"],  # readers want the key; "ab" is no token, so it is moot
        "tokenizer.ggml.bos_token_id": FX_BOS,
        "tokenizer.ggml.eos_token_id": FX_EOS,
        "tokenizer.ggml.add_bos_token": False,
    }


def bytes_to_letters() -> dict[int, str]:
    """The printable letter that stands for each byte in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    others = (byte for byte in range(256) if byte not in letters)
    return letters | {byte: chr(256 + i) for i, byte in enumerate(others)}


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    *,
    quantization: gguf.GGMLQuantizationType = F32,
    extra: Mapping[str, np.ndarray] | None = None,
    split_max_tensors: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint as converters do: names, rotary rows, 1 + w norms, stacked experts.

    Args:
        config: the model's config.json, in transformers' form.
        weights: tensors under checkpoint names.
        quantization: of matrices; vectors stay F32.
    """
    arch = _ARCH[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=split_max_tensors)
    for key, value in {**describe(config), **(metadata or {})}.items():
        _add_value(writer, key, value)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in stack_experts(weights).items():
        values = _as_converted(name, tensor, config).float().numpy()
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        _add_tensor(writer, stored, values, quantization if values.ndim > 1 else F32)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if split_max_tensors:
        return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
    return path


def describe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of a config, as converters write it."""
    name = gguf.MODEL_ARCH_NAMES[_ARCH[config["model_type"]]]
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    optional = {
        "attention.sliding_window": config.get("sliding_window"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "expert_count": config.get("num_local_experts") or config.get("num_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    if rope["rope_type"] != "default":
        optional["rope.scaling.type"] = rope["rope_type"]
        optional["rope.scaling.factor"] = float(rope["factor"])
    own |= {key: value for key, value in optional.items() if value}
    return {f"{name}.{key}": value for key, value in own.items()}


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        kinds[type(value)](key, value)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType
) -> None:
    if kind == F32:
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    else:
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def _as_converted(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Change a tensor's values or their order as converters of its family do."""
    kind = config["model_type"]
    if kind in ("llama", "mistral", "mixtral"):
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        for part, num_heads in heads.items():
            if f".{part}." in name:
                halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
                return halves.transpose(1, 2).reshape(tensor.shape)
    if kind.startswith("gemma") and "norm" in name:
        return tensor + 1.0
    if name.endswith("shared_expert_gate.weight"):
        return tensor.reshape(-1)
    return tensor


def stack_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the matrices of a layer's experts, in place of the first of them."""
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        head, mark, rest = name.partition(".experts.")
        number, _, part = rest.partition(".")
        if not mark or not number.isdigit():
            result[name] = tensor
            continue
        parts = []
        while f"{head}.experts.{len(parts)}.{part}" in weights:
            parts.append(weights[f"{head}.experts.{len(parts)}.{part}"])
        result[f"{head}.experts.{part}"] = torch.stack(parts)
    return result
