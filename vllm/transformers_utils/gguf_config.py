"""The model config that a GGUF file's metadata amounts to.

Called by `config.get_config` for GGUF files. Translates the file's keys into those of config.json,
one row an architecture; what the file does not say is left to the family's defaults. Reads no
weights except the small table of rotary factors that some converters store as a tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.errors import ConfigError
from vllm.transformers_utils.gguf_file import GGUFFile
from vllm.transformers_utils.gguf_tensor import GGUFTensor

ROPE_FACTORS = "rope_freqs.weight"
_F32 = 0
# The largest Gemma of each generation divides by hidden size / heads, the others by the head size.
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62


@dataclass(frozen=True, slots=True, kw_only=True)
class _Translation:
    """How one GGUF architecture becomes a config: target family and its own extra keys."""

    model_type: Callable[[GGUFFile], str]
    extra: Callable[[GGUFFile, dict[str, Any]], None]


def gguf_to_config(file: GGUFFile) -> dict[str, Any]:
    """Translate a file's metadata into the raw form of a config.json.

    Raises:
        ConfigError: an architecture that is not served, or a key that it needs is missing.
    """
    row = _ARCHITECTURES.get(file.architecture)
    if row is None:
        raise ConfigError(
            f"{file.path} holds a model of GGUF architecture {file.architecture!r}. "
            f"Served: {', '.join(sorted(_ARCHITECTURES))}."
        )
    config = _common(file)
    config["model_type"] = row.model_type(file)
    _read_rope(file, config)
    row.extra(file, config)
    return config


def stop_token_ids(file: GGUFFile) -> list[int]:
    """Return the ids that end a text or a turn, the end-of-sequence id first."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [file.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return list(dict.fromkeys(int(i) for i in ids if i is not None))


def _need(file: GGUFFile, key: str) -> Any:
    value = file.get(key)
    if value is None:
        raise ConfigError(f"{file.path}: metadata key '{file.architecture}.{key}' is missing.")
    return value


def _uniform(file: GGUFFile, key: str, value: Any) -> int:
    """Return the one number that a per-layer array repeats."""
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ConfigError(
                f"{file.path}: '{file.architecture}.{key}' differs between layers ({value}); "
                "models of this architecture are served with equal layers only."
            )
        value = value[0]
    return int(value)


def _head_dim(file: GGUFFile, hidden: int, heads: int) -> int:
    """Return the size of a head: as stated, else by the query matrix (older files)."""
    query = file.tensors.get("blk.0.attn_q.weight")
    rows = query.shape[0] if query else hidden
    return int(file.get("attention.key_length") or rows // heads)


def _common(file: GGUFFile) -> dict[str, Any]:
    """Read the keys that every decoder has, under their names in config.json."""
    heads = _uniform(file, "attention.head_count", _need(file, "attention.head_count"))
    kv_heads = file.get("attention.head_count_kv", heads)
    hidden = int(_need(file, "embedding_length"))
    embedding = file.tensors.get("token_embd.weight")
    vocab_size = (
        embedding.shape[0]
        if embedding
        else file.get("vocab_size") or file.array_len("tokenizer.ggml.tokens")
    )
    tokens = {
        f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {
        "vocab_size": int(vocab_size),
        "hidden_size": hidden,
        "intermediate_size": _uniform(
            file, "feed_forward_length", file.get("feed_forward_length", 0)
        ),
        "num_hidden_layers": int(_need(file, "block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": _uniform(file, "attention.head_count_kv", kv_heads),
        "head_dim": _head_dim(file, hidden, heads),
        "rms_norm_eps": float(_need(file, "attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": int(_need(file, "context_length")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **tokens,
    }


def _read_rope(file: GGUFFile, config: dict[str, Any]) -> None:
    if file.get("rope.freq_base") is not None:
        config["rope_theta"] = float(file.get("rope.freq_base"))
    rotary_dims = file.get("rope.dimension_count")
    if rotary_dims and int(rotary_dims) != config["head_dim"]:
        config["partial_rotary_factor"] = int(rotary_dims) / config["head_dim"]
    scaling = _scaling_from_metadata(file)
    factors = _read_rope_factors(file)
    if factors is not None:
        if scaling is not None:
            raise ConfigError(
                f"{file.path} asks for rotary scaling twice: by metadata "
                f"({scaling['rope_type']}) and by tensor {ROPE_FACTORS}. Convert the file again."
            )
        scaling = _scaling_from_factors(file, factors, config)
    if scaling is not None:
        config["rope_scaling"] = scaling


def _scaling_from_metadata(file: GGUFFile) -> dict[str, Any] | None:
    kind = file.get("rope.scaling.type")
    factor = file.get("rope.scaling.factor") or file.get("rope.scale_linear")
    if kind is None and factor:
        kind = "linear"
    if kind in (None, "none") or (kind == "linear" and float(factor or 1.0) == 1.0):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    for key, name in (
        ("original_context_length", "original_max_position_embeddings"),
        ("attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if file.get(f"rope.scaling.{key}") is not None:
            scaling[name] = file.get(f"rope.scaling.{key}")
    if kind == "yarn" and "original_max_position_embeddings" not in scaling and factor:
        # The file states the extended length only.
        scaling["original_max_position_embeddings"] = int(file.get("context_length") / factor)
    return scaling


def _read_rope_factors(file: GGUFFile) -> list[float] | None:
    """Read the divisors of the rotary frequencies; None if there are none or all are one."""
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    factors = _read_float32(tensor)
    return None if all(f == 1.0 for f in factors) else factors


def _read_float32(tensor: GGUFTensor) -> list[float]:
    if tensor.type_id != _F32:
        raise ConfigError(
            f"{tensor.path}: tensor {tensor.name} is {tensor.type_name}; expected F32."
        )
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset_bytes)
        return list(struct.unpack(f"<{tensor.num_elements}f", file.read(tensor.num_bytes)))


def _scaling_from_factors(
    file: GGUFFile, factors: list[float], config: dict[str, Any]
) -> dict[str, Any]:
    """Express a table of divisors as the scaling type that takes one: longrope, attention as is.

    Converters write llama3 scaling this way: worked out, one divisor for each pair of rotary dims.
    """
    pairs = int(file.get("rope.dimension_count") or config["head_dim"]) // 2
    if len(factors) != pairs:
        raise ConfigError(
            f"{file.path}: {ROPE_FACTORS} has {len(factors)} factors, but {pairs} pairs of "
            "dimensions are rotated. The tensor contradicts the metadata; convert the file again."
        )
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def _llama_type(file: GGUFFile) -> str:
    """One GGUF architecture covers Llama, Mistral (its window is the mark) and Mixtral."""
    if file.get("expert_count"):
        return "mixtral"
    return "mistral" if file.get("attention.sliding_window") else "llama"


def _llama_extra(file: GGUFFile, config: dict[str, Any]) -> None:
    if config["model_type"] == "mixtral":
        config["num_local_experts"] = int(_need(file, "expert_count"))
        config["num_experts_per_tok"] = int(_need(file, "expert_used_count"))
    if config["model_type"] != "llama":
        config["sliding_window"] = file.get("attention.sliding_window")
    else:
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors


def _no_extra(file: GGUFFile, config: dict[str, Any]) -> None:
    return None


def _qwen3_extra(file: GGUFFile, config: dict[str, Any]) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors


def _qwen2_moe_extra(file: GGUFFile, config: dict[str, Any]) -> None:
    config["num_experts"] = int(_need(file, "expert_count"))
    config["num_experts_per_tok"] = int(_need(file, "expert_used_count"))
    experts = file.tensors.get("blk.0.ffn_gate_exps.weight")
    shared = file.tensors.get("blk.0.ffn_gate_shexp.weight")
    expert_width = file.get("expert_feed_forward_length") or (experts and experts.shape[1])
    shared_width = file.get("expert_shared_feed_forward_length") or (shared and shared.shape[0])
    config["moe_intermediate_size"] = int(expert_width or config["intermediate_size"])
    config["shared_expert_intermediate_size"] = int(shared_width or 0)


def _gemma2_extra(file: GGUFFile, config: dict[str, Any]) -> None:
    config["attn_logit_softcapping"] = file.get("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = file.get("final_logit_softcapping", 30.0)
    config["sliding_window"] = file.get("attention.sliding_window", 4096)
    _gemma_scale(config, config["num_hidden_layers"] == _GEMMA2_27B_LAYERS)


def _gemma3_extra(file: GGUFFile, config: dict[str, Any]) -> None:
    config["sliding_window"] = file.get("attention.sliding_window")
    config["attn_logit_softcapping"] = file.get("attn_logit_softcapping")
    config["final_logit_softcapping"] = file.get("final_logit_softcapping")
    pattern = file.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if p else "full_attention" for p in pattern]
    elif pattern:
        config["sliding_window_pattern"] = int(pattern)
    if file.get("rope.freq_base_swa"):
        config["rope_local_base_freq"] = float(file.get("rope.freq_base_swa"))
    _gemma_scale(config, config["num_hidden_layers"] == _GEMMA3_27B_LAYERS)


def _gemma_scale(config: dict[str, Any], is_largest: bool) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    config["query_pre_attn_scalar"] = hidden // heads if is_largest else config["head_dim"]


_ARCHITECTURES: dict[str, _Translation] = {
    "llama": _Translation(model_type=_llama_type, extra=_llama_extra),
    "qwen2": _Translation(model_type=lambda _: "qwen2", extra=_no_extra),
    "qwen3": _Translation(model_type=lambda _: "qwen3", extra=_qwen3_extra),
    "qwen2moe": _Translation(model_type=lambda _: "qwen2_moe", extra=_qwen2_moe_extra),
    "gemma": _Translation(model_type=lambda _: "gemma", extra=_no_extra),
    "gemma2": _Translation(model_type=lambda _: "gemma2", extra=_gemma2_extra),
    "gemma3": _Translation(model_type=lambda _: "gemma3_text", extra=_gemma3_extra),
}
