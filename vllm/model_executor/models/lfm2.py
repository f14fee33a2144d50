"""LFM2: short convolutions with attention in a few layers, dense or with experts.

Rows of `models/table.py`. Attention norms every query and key head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.sigmoid_router import RouterSizes, SigmoidRouter
from vllm.model_executor.models.block_context import BlockContext
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.config_reader import FULL, check_layer_type, read_attention
from vllm.model_executor.models.shapes import LayerShape, MlpShape, ModelShape
from vllm.model_executor.models.state_parts import ShortConvShape
from vllm.model_executor.models.weight_map import WeightRow
from vllm.model_executor.models.weight_rows import layer_row

_ROWS = (
    WeightRow(source="model.embed_tokens", target="embed"),
    WeightRow(source="model.embedding_norm", target="norm"),
    WeightRow(source="lm_head", target="lm_head"),
    layer_row("operator_norm", "input_norm"),
    layer_row("ffn_norm", "mlp_norm"),
    layer_row("conv.conv", "attention.conv"),
    layer_row("conv.in_proj", "attention.in_proj"),
    layer_row("conv.out_proj", "attention.out_proj"),
    layer_row("self_attn.q_proj", "attention.qkv", "q"),
    layer_row("self_attn.k_proj", "attention.qkv", "k"),
    layer_row("self_attn.v_proj", "attention.qkv", "v"),
    layer_row("self_attn.out_proj", "attention.out"),
    layer_row("self_attn.q_layernorm", "attention.q_norm"),
    layer_row("self_attn.k_layernorm", "attention.k_norm"),
    layer_row("feed_forward.w1", "mlp.gate_up", "gate"),
    layer_row("feed_forward.w3", "mlp.gate_up", "up"),
    layer_row("feed_forward.w2", "mlp.down"),
)


class Lfm2ForCausalLM(CausalLM):
    """LFM2, dense."""

    has_inner_state = True
    weight_rows = _ROWS

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""
        mlp = MlpShape(intermediate_size=_read_inner_size(config), activation="silu")
        return _make_shape(config, [mlp] * config["num_hidden_layers"])


class Lfm2MoeForCausalLM(CausalLM):
    """LFM2 with experts from some layer on."""

    has_inner_state = True
    weight_rows = (
        *_ROWS,
        layer_row("feed_forward.gate", "mlp.router.linear"),
        layer_row("feed_forward", "mlp.router.correction"),
        layer_row("feed_forward.experts.{e}.w1", "mlp.experts", "gate"),
        layer_row("feed_forward.experts.{e}.w3", "mlp.experts", "up"),
        layer_row("feed_forward.experts.{e}.w2", "mlp.experts", "down"),
    )

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""
        dense = MlpShape(intermediate_size=config["intermediate_size"], activation="silu")
        moe = SigmoidMoeShape(
            router=RouterSizes(
                num_experts=config["num_experts"],
                num_chosen=config["num_experts_per_tok"],
                correction="expert_bias" if config["use_expert_bias"] else None,
                renormalize=bool(config["norm_topk_prob"]),
                epsilon=1e-6,
                scale=float(config["routed_scaling_factor"]),
            ),
            inner_size=config["moe_intermediate_size"],
        )
        num_dense, num_layers = config["num_dense_layers"], config["num_hidden_layers"]
        return _make_shape(
            config, [dense if layer < num_dense else moe for layer in range(num_layers)]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidMoeShape:
    """Gated experts that a sigmoid router chooses.

    Attributes:
        inner_size: inner size of one expert.
    """

    router: RouterSizes
    inner_size: int

    def build(self, layer: int, context: BlockContext) -> SigmoidMoe:
        """See PartShape."""
        return SigmoidMoe(self, context)


class SigmoidMoe(nn.Module):
    """A sigmoid router and its experts."""

    def __init__(self, shape: SigmoidMoeShape, context: BlockContext) -> None:
        super().__init__()
        self._tp = context.tp
        self.router = SigmoidRouter(context.hidden_size, shape.router, context.dtype)
        self.experts = FusedMoE(
            shape.router.num_experts,
            shape.router.num_chosen,
            context.hidden_size,
            shape.inner_size,
            activation="silu",
            renormalize=shape.router.renormalize,
            dtype=context.dtype,
            tp=context.tp,
        )

    def forward(self, x_TE: Tensor) -> Tensor:
        """Return the contribution of the chosen experts, [T, E]."""
        weights_TK, ids_TK = self.router(x_TE)
        return self._tp.all_reduce(self.experts.run_chosen(x_TE, weights_TK, ids_TK))


def _make_shape(config: Mapping[str, Any], mlps: list[MlpShape | SigmoidMoeShape]) -> ModelShape:
    attention = read_attention(config, window=0, has_qk_norm=True)
    conv = ShortConvShape(taps=config["conv_L_cache"], bias=bool(config["conv_bias"]))

    def read_layer(layer: int) -> LayerShape:
        is_conv = check_layer_type(config, layer, FULL, "conv") == "conv"
        return LayerShape(attention=conv if is_conv else attention, mlp=mlps[layer])

    return ModelShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        max_positions=config["max_position_embeddings"],
        layers=tuple(read_layer(layer) for layer in range(config["num_hidden_layers"])),
        norm_epsilon=config["norm_eps"],
        is_tied=bool(config["tie_word_embeddings"]),
    )


def _read_inner_size(config: Mapping[str, Any]) -> int:
    """Return the inner size of the MLPs, which the config gives before its adjustments."""
    size = int(config["intermediate_size"])
    if not config["block_auto_adjust_ff_dim"]:
        return size
    size = 2 * size // 3
    if config["block_ffn_dim_multiplier"] is None:
        return size
    step = int(config["block_multiple_of"])
    return -(-int(config["block_ffn_dim_multiplier"] * size) // step) * step
