"""Qwen 2 and 2.5: Llama with biases on query, key and value, and windows on some layers.

Row of `models/table.py`. Which layers slide (`use_sliding_window`, `max_window_layers`) is in the
config's `layer_types` once it is normalised. `hybrid_attention_layers` names the type of each
layer: layers of one type share the size of their cache blocks and the kernel that they ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.hybrid.layer_kinds import read_layer_type
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.config_reader import (
    read_attention,
    read_layer_config,
    read_mlp,
    read_window,
)
from vllm.model_executor.models.llama import make_llama_shape
from vllm.model_executor.models.shapes import LayerShape, ModelShape
from vllm.model_executor.models.weight_rows import LLAMA_ROWS


class Qwen2ForCausalLM(CausalLM):
    """Qwen 2."""

    weight_rows = LLAMA_ROWS

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""

        def read_layer(layer: int) -> LayerShape:
            own = read_layer_config(config, layer)
            window = read_window(config, layer)
            kind = read_layer_type(config, layer)
            return LayerShape(
                attention=read_attention(own, window=window, qkv_bias=True, kind=kind),
                mlp=read_mlp(own),
            )

        return make_llama_shape(config, read_layer)
