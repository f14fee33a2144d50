"""Qwen3-Next: gated delta nets with gated attention every few layers, experts in every layer.

Row of `models/table.py`. Norms scale by 1 + w; rotary positions turn a part of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.activation import resolve_gated_activation
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.config_reader import FULL, check_layer_type, read_mlp
from vllm.model_executor.models.gated_attention import read_gated_attention
from vllm.model_executor.models.shapes import LayerShape, MlpShape, ModelShape, MoeShape
from vllm.model_executor.models.state_parts import read_delta_net
from vllm.model_executor.models.weight_rows import (
    ATTENTION_ROWS,
    EXPERT_ROWS,
    MLP_ROWS,
    OUTER_ROWS,
    PRE_NORM_ROWS,
    layer_row,
)

DELTA_NET_ROWS = (
    layer_row("linear_attn", "attention.decay"),
    layer_row("linear_attn.conv1d", "attention.conv"),
    layer_row("linear_attn.norm", "attention.norm"),
    layer_row("linear_attn.out_proj", "attention.out_proj"),
)
"""What Qwen3-Next and Qwen3.5 name alike."""

DRAFT_LAYERS = ((r"mtp\..*", "layers that draft several tokens at once are not served"),)


class Qwen3NextForCausalLM(CausalLM):
    """Qwen3-Next."""

    has_inner_state = True
    weight_rows = (
        *OUTER_ROWS,
        *PRE_NORM_ROWS,
        *ATTENTION_ROWS,
        *MLP_ROWS,
        *EXPERT_ROWS,
        *DELTA_NET_ROWS,
        layer_row("linear_attn.in_proj_qkvz", "attention.in_proj", "qkvz"),
        layer_row("linear_attn.in_proj_ba", "attention.in_proj", "ba"),
    )
    ignored_weights = (*CausalLM.ignored_weights, *DRAFT_LAYERS)

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""
        return make_qwen3_next_shape(config, is_interleaved=True)


def make_qwen3_next_shape(config: Mapping[str, Any], *, is_interleaved: bool) -> ModelShape:
    """Return the shape of Qwen3-Next and Qwen3.5.

    Args:
        config: the normalised config.
        is_interleaved: how the checkpoint keeps the projections of the gated delta nets.
    """

    def read_layer(layer: int) -> LayerShape:
        return LayerShape(
            attention=read_gated_attention(config)
            if check_layer_type(config, layer, FULL, "linear_attention") == FULL
            else read_delta_net(config, is_interleaved=is_interleaved),
            mlp=_read_mlp(config, layer),
        )

    return ModelShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        max_positions=config["max_position_embeddings"],
        layers=tuple(read_layer(layer) for layer in range(config["num_hidden_layers"])),
        norm_epsilon=config["rms_norm_eps"],
        has_unit_offset_norm=True,
        is_tied=bool(config["tie_word_embeddings"]),
    )


def _read_mlp(config: Mapping[str, Any], layer: int) -> MlpShape | MoeShape:
    num_experts = config.get("num_experts") or 0
    is_dense = layer in (config.get("mlp_only_layers") or ())
    if not num_experts or is_dense or (layer + 1) % (config.get("decoder_sparse_step") or 1):
        return read_mlp(config)
    return MoeShape(
        num_experts=num_experts,
        num_chosen=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        activation=resolve_gated_activation(config["hidden_act"]),
        renormalize=bool(config.get("norm_topk_prob", True)),
        shared_size=config["shared_expert_intermediate_size"],
    )
