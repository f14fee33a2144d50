"""Reads what decoder families have in common out of a normalised config.

Called by the families' `read_shape`. Configs are plain dicts in the form that
`transformers_utils/config.py` gives: defaults filled in, `layer_types` and `rope_parameters` there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.errors import ConfigError
from vllm.model_executor.layers.activation import resolve_gated_activation
from vllm.model_executor.models.shapes import AttentionShape, MlpShape

SLIDING, FULL = "sliding_attention", "full_attention"


def check_layer_type(config: Mapping[str, Any], layer: int, *allowed: str) -> str:
    """Return the word that `layer_types` has for a layer.

    Raises:
        ConfigError: it is none of `allowed`.
    """
    kind = str(config["layer_types"][layer])
    if kind not in allowed:
        raise ConfigError(
            f"layer {layer} has layer type {kind!r}, which this family does not have; allowed: "
            + ", ".join(allowed)
        )
    return kind


def read_window(config: Mapping[str, Any], layer: int) -> int:
    """Return the window of a layer in tokens; 0 where `layer_types` calls it full.

    `sliding_window` is only the size used by layers that are typed sliding; a layer typed full
    never gets it.

    Raises:
        ConfigError: another layer type, or a sliding layer without a size.
    """
    if check_layer_type(config, layer, FULL, SLIDING) == FULL:
        return 0
    window = config["sliding_window"]
    if not window:
        raise ConfigError(
            f"layer {layer} is typed {SLIDING} but sliding_window is {window!r}; give its size"
        )
    return int(window)


def read_layer_config(config: Mapping[str, Any], layer: int) -> Mapping[str, Any]:
    """Return the config of one layer: the model's with that layer's `per_layer_config` on top."""
    overrides = config.get("per_layer_config") or {}
    own = overrides.get(layer) or overrides.get(str(layer))
    return {**config, **own} if own else config


def read_attention(
    config: Mapping[str, Any],
    *,
    window: int,
    qkv_bias: bool = False,
    out_bias: bool = False,
    has_qk_norm: bool = False,
    kind: str = "full",
) -> AttentionShape:
    """Return the attention of a layer whose logits are scaled by head_size ** -0.5."""
    return AttentionShape(
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"],
        scale=config["head_dim"] ** -0.5,
        rope=config["rope_parameters"],
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        has_qk_norm=has_qk_norm,
        window=window,
        kind=kind,
    )


def read_mlp(config: Mapping[str, Any]) -> MlpShape:
    """Return the gated MLP of a layer."""
    return MlpShape(
        intermediate_size=config["intermediate_size"],
        activation=resolve_gated_activation(config["hidden_act"]),
        bias=bool(config.get("mlp_bias")),
    )
