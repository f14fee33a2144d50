"""Llama, and what has its shape: SmolLM2, Aquila, InternLM, and Mistral with its window as a mask.

Rows of `models/table.py` point here. Families that differ in their layers only use
`make_llama_shape`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.config_reader import (
    read_attention,
    read_layer_config,
    read_mlp,
    read_window,
)
from vllm.model_executor.models.shapes import LayerShape, ModelShape
from vllm.model_executor.models.weight_rows import LLAMA_ROWS


class LlamaForCausalLM(CausalLM):
    """Pre-norm decoder with rotary positions and a gated MLP; attention is full in every layer."""

    weight_rows = LLAMA_ROWS

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""
        return make_llama_shape(config, lambda layer: _read_layer(config, layer, window=0))


class MistralForCausalLM(CausalLM):
    """Llama with a window: on every layer, or on those that `layer_types` calls sliding."""

    weight_rows = LLAMA_ROWS

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""

        def read_layer(layer: int) -> LayerShape:
            is_typed = config.get("layer_types") is not None
            window = read_window(config, layer) if is_typed else config["sliding_window"] or 0
            return _read_layer(config, layer, window=window)

        return make_llama_shape(config, read_layer)


def _read_layer(config: Mapping[str, Any], layer: int, window: int) -> LayerShape:
    own = read_layer_config(config, layer)
    bias = bool(own.get("attention_bias") or own.get("bias"))
    return LayerShape(
        attention=read_attention(own, window=window, qkv_bias=bias, out_bias=bias),
        mlp=read_mlp(own),
    )


def make_llama_shape(
    config: Mapping[str, Any], read_layer: Callable[[int], LayerShape]
) -> ModelShape:
    """Return the shape of a model that is Llama outside its layers.

    Args:
        config: the normalised config.
        read_layer: layer index -> its shape.
    """
    return ModelShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        max_positions=config["max_position_embeddings"],
        layers=tuple(read_layer(layer) for layer in range(config["num_hidden_layers"])),
        norm_epsilon=config["rms_norm_eps"],
        is_tied=bool(config["tie_word_embeddings"]),
        logit_scale=float(config.get("logit_scale") or 1.0),
    )
