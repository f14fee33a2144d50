"""Mixtral: Mistral with a mixture of experts in place of every MLP.

Row of `models/table.py`. Checkpoints name the experts' matrices w1, w3 (gate, up) and w2 (down).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.activation import resolve_gated_activation
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.config_reader import read_attention, read_layer_config
from vllm.model_executor.models.llama import make_llama_shape
from vllm.model_executor.models.shapes import LayerShape, ModelShape, MoeShape
from vllm.model_executor.models.weight_rows import (
    ATTENTION_ROWS,
    MIXTRAL_EXPERT_ROWS,
    OUTER_ROWS,
    PRE_NORM_ROWS,
)


class MixtralForCausalLM(CausalLM):
    """Mixtral."""

    weight_rows = OUTER_ROWS + ATTENTION_ROWS + PRE_NORM_ROWS + MIXTRAL_EXPERT_ROWS
    weight_renames = (
        (r"(.*)\.mlp\.gate\.weight", r"\1.block_sparse_moe.gate.weight"),
        (r"(.*)\.mlp\.(experts\.\d+)\.gate_proj\.(.*)", r"\1.block_sparse_moe.\2.w1.\3"),
        (r"(.*)\.mlp\.(experts\.\d+)\.up_proj\.(.*)", r"\1.block_sparse_moe.\2.w3.\3"),
        (r"(.*)\.mlp\.(experts\.\d+)\.down_proj\.(.*)", r"\1.block_sparse_moe.\2.w2.\3"),
    )
    """Names that transformers 5 gives in memory, and some writers in files."""

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""

        def read_layer(layer: int) -> LayerShape:
            own = read_layer_config(config, layer)
            moe = MoeShape(
                num_experts=own["num_local_experts"],
                num_chosen=own["num_experts_per_tok"],
                intermediate_size=own["intermediate_size"],
                activation=resolve_gated_activation(own["hidden_act"]),
                renormalize=True,
            )
            window = own["sliding_window"] or 0
            return LayerShape(attention=read_attention(own, window=window), mlp=moe)

        return make_llama_shape(config, read_layer)
