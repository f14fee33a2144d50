"""Gemma 2: norms around attention and MLP, capped logits, windows on every other layer.

Row of `models/table.py`. `make_gemma_shape` is shared with Gemma 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.model_executor.layers.activation import resolve_gated_activation
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.config_reader import read_layer_config, read_window
from vllm.model_executor.models.shapes import AttentionShape, LayerShape, MlpShape, ModelShape
from vllm.model_executor.models.weight_rows import (
    ATTENTION_ROWS,
    MLP_ROWS,
    OUTER_ROWS,
    SANDWICH_NORM_ROWS,
)


class Gemma2ForCausalLM(CausalLM):
    """Gemma 2."""

    weight_rows = OUTER_ROWS + ATTENTION_ROWS + SANDWICH_NORM_ROWS + MLP_ROWS

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""
        bias = bool(config["attention_bias"])

        def read_attention(own: Mapping[str, Any], layer: int) -> AttentionShape:
            return AttentionShape(
                num_heads=own["num_attention_heads"],
                num_kv_heads=own["num_key_value_heads"],
                head_size=own["head_dim"],
                scale=own["query_pre_attn_scalar"] ** -0.5,
                rope=own["rope_parameters"],
                qkv_bias=bias,
                out_bias=bias,
                window=read_window(config, layer),
                soft_cap=float(own["attn_logit_softcapping"] or 0.0),
            )

        return make_gemma_shape(config, read_attention, has_post_norms=True)


def make_gemma_shape(
    config: Mapping[str, Any],
    read_attention: Callable[[Mapping[str, Any], int], AttentionShape],
    *,
    has_post_norms: bool,
) -> ModelShape:
    """Return the shape of a Gemma model.

    Args:
        config: the normalised config.
        has_post_norms: whether the outputs of attention and MLP are normed before they are added.
        read_attention: (config of a layer, layer index) -> the layer's attention.
    """

    def read_layer(layer: int) -> LayerShape:
        own = read_layer_config(config, layer)
        mlp = MlpShape(
            intermediate_size=own["intermediate_size"],
            activation=resolve_gated_activation(own["hidden_activation"]),
        )
        return LayerShape(attention=read_attention(own, layer), mlp=mlp)

    return ModelShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        max_positions=config["max_position_embeddings"],
        layers=tuple(read_layer(layer) for layer in range(config["num_hidden_layers"])),
        norm_epsilon=config["rms_norm_eps"],
        has_unit_offset_norm=True,
        has_post_norms=has_post_norms,
        embed_scale=config["hidden_size"] ** 0.5,
        is_tied=bool(config["tie_word_embeddings"]),
        logit_cap=float(config.get("final_logit_softcapping") or 0.0),
    )
