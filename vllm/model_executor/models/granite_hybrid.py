"""Granite 4 hybrid: Mamba-2 and attention, experts beside an expert for all, constant multipliers.

Row of `models/table.py`. Attention has rotary positions only where the config says "rope".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.model_executor.layers.activation import resolve_gated_activation
from vllm.model_executor.models.bamba import MAMBA_ROWS
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.config_reader import FULL, check_layer_type, read_attention
from vllm.model_executor.models.shapes import (
    AttentionShape,
    LayerShape,
    MlpShape,
    ModelShape,
    MoeShape,
)
from vllm.model_executor.models.state_parts import read_mamba2
from vllm.model_executor.models.weight_rows import (
    ATTENTION_ROWS,
    EXPERT_ROWS,
    OUTER_ROWS,
    PRE_NORM_ROWS,
    layer_row,
)

_MAMBA = ("linear_attention", "mamba")


class GraniteMoeHybridForCausalLM(CausalLM):
    """Granite 4 hybrid, dense or with experts."""

    has_inner_state = True
    weight_rows = (
        *OUTER_ROWS,
        *ATTENTION_ROWS,
        *MAMBA_ROWS,
        *PRE_NORM_ROWS,
        *(row for row in EXPERT_ROWS if "shared_expert" not in row.source),
        layer_row("shared_mlp.input_linear", "mlp.gate_up"),
        layer_row("shared_mlp.output_linear", "mlp.down"),
        layer_row("shared_mlp.input_linear", "mlp.shared.gate_up"),
        layer_row("shared_mlp.output_linear", "mlp.shared.down"),
    )
    weight_renames = (
        (r"(.*)\.block_sparse_moe\.router(\.layer)?\.weight", r"\1.mlp.gate.weight"),
        (r"(.*)\.block_sparse_moe\.input_linear\.weight", r"\1.mlp.experts.gate_up_proj"),
        (r"(.*)\.block_sparse_moe\.output_linear\.weight", r"\1.mlp.experts.down_proj"),
        (r"(.*)\.block_sparse_moe\.experts\.(.*)", r"\1.mlp.experts.\2"),
    )

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""
        attention, mamba, mlp = _read_attention(config), read_mamba2(config), _read_mlp(config)

        def read_layer(layer: int) -> LayerShape:
            kind = check_layer_type(config, layer, FULL, "attention", *_MAMBA)
            is_mamba = kind in _MAMBA
            return LayerShape(attention=mamba if is_mamba else attention, mlp=mlp)

        return ModelShape(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            max_positions=config["max_position_embeddings"],
            layers=tuple(read_layer(layer) for layer in range(config["num_hidden_layers"])),
            norm_epsilon=config["rms_norm_eps"],
            residual_scale=float(config["residual_multiplier"]),
            embed_scale=float(config["embedding_multiplier"]),
            is_tied=bool(config["tie_word_embeddings"]),
            logit_scale=1.0 / float(config["logits_scaling"]),
        )


def _read_attention(config: Mapping[str, Any]) -> AttentionShape:
    bias = bool(config["attention_bias"])
    shape = read_attention(config, window=0, qkv_bias=bias, out_bias=bias)
    is_rotary = config["position_embedding_type"] == "rope"
    return replace(
        shape,
        scale=float(config["attention_multiplier"]),
        rope=shape.rope if is_rotary else None,
    )


def _read_mlp(config: Mapping[str, Any]) -> MlpShape | MoeShape:
    activation = resolve_gated_activation(config["hidden_act"])
    shared_size = config["shared_intermediate_size"]
    if not config["num_local_experts"]:
        return MlpShape(intermediate_size=shared_size, activation=activation)
    return MoeShape(
        num_experts=config["num_local_experts"],
        num_chosen=config["num_experts_per_tok"],
        intermediate_size=config["intermediate_size"],
        activation=activation,
        renormalize=True,  # a softmax over the chosen logits
        shared_size=shared_size,
        has_shared_gate=False,
    )
