"""Llama 4, text: layers with positions see their chunk, layers without see everything.

Row of `models/table.py`. Queries of layers without positions grow with their position; experts are
given their input scaled by the router, beside one expert that every token takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vllm.batch import AttentionState, ForwardBatch
from vllm.model_executor.layers.activation import resolve_gated_activation
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.parts import Product
from vllm.model_executor.models.block_context import BlockContext
from vllm.model_executor.models.blocks import AttentionBlock, MlpBlock
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.config_reader import FULL, check_layer_type
from vllm.model_executor.models.llama import make_llama_shape
from vllm.model_executor.models.shapes import (
    AttentionShape,
    LayerShape,
    MlpShape,
    ModelShape,
    MoeShape,
)
from vllm.model_executor.models.weight_map import LoadReport
from vllm.model_executor.models.weight_rows import (
    ATTENTION_ROWS,
    OUTER_ROWS,
    PRE_NORM_ROWS,
    layer_row,
)

CHUNKED = "chunked_attention"
_FUSED_EXPERTS = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")


class Llama4ForCausalLM(CausalLM):
    """Llama 4 (llama4_text)."""

    weight_rows = (
        *OUTER_ROWS,
        *ATTENTION_ROWS,
        *PRE_NORM_ROWS,
        layer_row("feed_forward.gate_proj", "mlp.gate_up", "gate"),
        layer_row("feed_forward.up_proj", "mlp.gate_up", "up"),
        layer_row("feed_forward.down_proj", "mlp.down"),
        layer_row("feed_forward.router", "mlp.router"),
        layer_row("feed_forward.experts.{e}.gate_proj", "mlp.experts", "gate"),
        layer_row("feed_forward.experts.{e}.up_proj", "mlp.experts", "up"),
        layer_row("feed_forward.experts.{e}.down_proj", "mlp.experts", "down"),
        layer_row("feed_forward.shared_expert.gate_proj", "mlp.shared.gate_up", "gate"),
        layer_row("feed_forward.shared_expert.up_proj", "mlp.shared.gate_up", "up"),
        layer_row("feed_forward.shared_expert.down_proj", "mlp.shared.down"),
    )
    ignored_weights = (
        *CausalLM.ignored_weights,
        (
            r"(vision_model|multi_modal_projector)\..*",
            "the text part of the model is served, not the images",
        ),
    )
    weight_renames = (
        (r"language_model\.(model\..*)", r"\1"),
        (r"language_model\.(lm_head\..*)", r"\1"),
    )

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""

        def read_layer(layer: int) -> LayerShape:
            return LayerShape(
                attention=_read_attention(config, layer), mlp=_read_mlp(config, layer)
            )

        return make_llama_shape(config, read_layer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> LoadReport:
        """See TextModel; checkpoints store the experts' matrices turned."""
        return super().load_weights(_turn_experts(weights))


def _turn_experts(weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    for name, tensor in weights:
        is_turned = tensor.dim() == 3 and _FUSED_EXPERTS.fullmatch(name) is not None
        yield name, tensor.transpose(1, 2) if is_turned else tensor


def _read_attention(config: Mapping[str, Any], layer: int) -> Llama4AttentionShape:
    is_rotary = bool(config["no_rope_layers"][layer])  # 1 marks a layer WITH positions
    kind = check_layer_type(config, layer, FULL, CHUNKED)
    bias = bool(config["attention_bias"])
    is_tuned = bool(config["attn_temperature_tuning"]) and not is_rotary
    heads = AttentionShape(
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"],
        scale=config["head_dim"] ** -0.5,
        rope=None,
        qkv_bias=bias,
        out_bias=bias,
    )
    return Llama4AttentionShape(
        heads=heads,
        rope=config["rope_parameters"] if is_rotary else None,
        chunk_tokens=int(config["attention_chunk_size"]) if kind == CHUNKED else 0,
        has_length_norm=is_rotary and bool(config["use_qk_norm"]),
        growth=float(config["attn_scale"]) if is_tuned else 0.0,
        growth_tokens=float(config["floor_scale"]),
    )


def _read_mlp(config: Mapping[str, Any], layer: int) -> MlpShape | ScaledInputMoeShape:
    activation = resolve_gated_activation(config["hidden_act"])
    if layer not in config["moe_layers"]:
        return MlpShape(intermediate_size=config["intermediate_size_mlp"], activation=activation)
    moe = MoeShape(
        num_experts=config["num_local_experts"],
        num_chosen=config["num_experts_per_tok"],
        intermediate_size=config["intermediate_size"],
        activation=activation,
        renormalize=False,
        shared_size=config["intermediate_size"],
        has_shared_gate=False,
    )
    return ScaledInputMoeShape(moe=moe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4AttentionShape:
    """Attention within a chunk or over everything; see PartShape.

    Attributes:
        heads: sizes; rope and head norms of it are not used.
        rope: rope settings, or None for a layer without positions.
        chunk_tokens: length of the chunks that tokens attend within; 0 is none.
        has_length_norm: whether turned queries and keys are brought to length one.
        growth, growth_tokens: queries at position p are scaled by
            1 + growth * log(1 + floor((p + 1) / growth_tokens)).
    """

    heads: AttentionShape
    rope: Mapping[str, Any] | None
    chunk_tokens: int
    has_length_norm: bool
    growth: float
    growth_tokens: float

    def build(self, layer: int, context: BlockContext) -> nn.Module:
        """See PartShape."""
        return Llama4AttentionBlock(layer, self, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledInputMoeShape:
    """A mixture whose experts see their input scaled by the router; see PartShape."""

    moe: MoeShape

    def build(self, layer: int, context: BlockContext) -> nn.Module:
        """See PartShape."""
        return ScaledInputMoeBlock(self.moe, context)


class Llama4AttentionBlock(AttentionBlock):
    """An AttentionBlock with neighbours turning, norms after turning and growing queries."""

    def __init__(self, layer: int, shape: Llama4AttentionShape, context: BlockContext) -> None:
        super().__init__(layer, shape.heads, context)
        size = shape.heads.head_size
        self._growth = shape.growth
        self._growth_tokens = shape.growth_tokens
        if shape.rope is not None:
            self.rope = context.ropes.get(size, shape.rope, is_neox=False)
        self.length_norm: RMSNorm | None = None
        if shape.has_length_norm:
            self.length_norm = RMSNorm(size, context.norm_epsilon, context.dtype)
            self.length_norm.weight.data.fill_(1.0)  # the norm has no scale
        heads = self.attention
        heads.params = replace(heads.params, chunk_tokens=shape.chunk_tokens)
        heads.query = replace(heads.query, chunk_tokens=shape.chunk_tokens)

    def forward(
        self,
        x_TE: Tensor,
        batch: ForwardBatch,
        attention: AttentionState,
        tokens_L: Tensor | None = None,
    ) -> Product:
        """Return what the attention gives to the residual stream; see Mixer."""
        q_size, kv_size = self.qkv.q_size, self.qkv.kv_size
        q, k, v = self.qkv(x_TE).split((q_size, kv_size, kv_size), dim=-1)
        q_THD, k_THD, v_THD = (x.unflatten(-1, (-1, self.head_size)) for x in (q, k, v))
        if self.rope is not None:
            self.rope(batch.positions, q_THD, k_THD)
        if self.length_norm is not None:
            self.length_norm.apply_in_place(q_THD)
            self.length_norm.apply_in_place(k_THD)
        if self._growth:
            q_THD = (q_THD.float() * self._measure_growth(batch.positions)).to(q_THD.dtype)
        out_THD = self.attention(q_THD, k_THD, v_THD, batch, attention)
        return self.out.contribute(out_THD.flatten(1), tokens_L)

    def _measure_growth(self, positions_T: Tensor) -> Tensor:
        """Return the factor of each token's query, float32 [T, 1, 1]."""
        steps_T = torch.floor((positions_T.double() + 1.0) / self._growth_tokens)
        return (torch.log1p(steps_T) * self._growth + 1.0).float()[:, None, None]


class ScaledInputMoeBlock(nn.Module):
    """A router, experts whose input it scales, and the expert that every token takes."""

    def __init__(self, shape: MoeShape, context: BlockContext) -> None:
        super().__init__()
        self._tp = context.tp
        self._num_chosen = shape.num_chosen
        hidden, dtype = context.hidden_size, context.dtype
        self.router = ReplicatedLinear(hidden, shape.num_experts, bias=False, dtype=dtype)
        self.experts = FusedMoE(
            shape.num_experts,
            1,
            hidden,
            shape.intermediate_size,
            activation=shape.activation,
            renormalize=False,
            dtype=dtype,
            tp=context.tp,
        )
        shared = MlpShape(intermediate_size=shape.shared_size, activation=shape.activation)
        self.shared = MlpBlock(shared, context, is_partial=True)

    def forward(self, x_TE: Tensor) -> Tensor:
        """Return the contribution of the chosen and the shared experts, [T, E]."""
        chosen = self.router(x_TE).float().topk(self._num_chosen, dim=-1)
        # torch.sigmoid rounds an element by its place in memory; exp and division do not.
        gates_TK = (1.0 / (1.0 + torch.exp(-chosen.values))).to(x_TE.dtype)
        ids_TK = chosen.indices.to(torch.int32)
        ones_T1 = torch.ones(x_TE.shape[0], 1, dtype=torch.float32, device=x_TE.device)
        total_TE = self.shared(x_TE)
        for place in range(self._num_chosen):
            scaled_TE = x_TE * gates_TK[:, place, None]
            ids_T1 = ids_TK[:, place, None].contiguous()
            total_TE = total_TE + self.experts.run_chosen(scaled_TE, ones_T1, ids_T1)
        return self._tp.all_reduce(total_TE)
