"""Qwen 2 MoE: Qwen 2 with a mixture of experts on most layers and one expert shared by all tokens.

Row of `models/table.py`. The shared expert's output is scaled by a gate of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.activation import resolve_gated_activation
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.config_reader import (
    read_attention,
    read_layer_config,
    read_mlp,
    read_window,
)
from vllm.model_executor.models.llama import make_llama_shape
from vllm.model_executor.models.shapes import LayerShape, ModelShape, MoeShape
from vllm.model_executor.models.weight_rows import EXPERT_ROWS, LLAMA_ROWS


class Qwen2MoeForCausalLM(CausalLM):
    """Qwen 1.5 and 2 MoE."""

    weight_rows = LLAMA_ROWS + EXPERT_ROWS

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""

        def read_layer(layer: int) -> LayerShape:
            own = read_layer_config(config, layer)
            attention = read_attention(
                own, window=read_window(config, layer), qkv_bias=bool(config["qkv_bias"])
            )
            is_sparse = _is_sparse(config, layer)
            return LayerShape(
                attention=attention, mlp=_read_moe(own) if is_sparse else read_mlp(own)
            )

        return make_llama_shape(config, read_layer)


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    return (
        layer not in config["mlp_only_layers"]
        and config["num_experts"] > 0
        and (layer + 1) % config["decoder_sparse_step"] == 0
    )


def _read_moe(config: Mapping[str, Any]) -> MoeShape:
    return MoeShape(
        num_experts=config["num_experts"],
        num_chosen=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        activation=resolve_gated_activation(config["hidden_act"]),
        renormalize=bool(config["norm_topk_prob"]),
        shared_size=config["shared_expert_intermediate_size"],
    )
