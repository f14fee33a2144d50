"""Qwen 3: Qwen 2 with a norm on every query and key head, and no biases unless the config says so.

Row of `models/table.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


class Qwen3ForCausalLM(CausalLM):
    """Qwen 3."""

    weight_rows = LLAMA_ROWS

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""
        bias = bool(config["attention_bias"])

        def read_layer(layer: int) -> LayerShape:
            own = read_layer_config(config, layer)
            attention = read_attention(
                own,
                window=read_window(config, layer),
                qkv_bias=bias,
                out_bias=bias,
                has_qk_norm=True,
            )
            return LayerShape(attention=attention, mlp=read_mlp(own))

        return make_llama_shape(config, read_layer)
