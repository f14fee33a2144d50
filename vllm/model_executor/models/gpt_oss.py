"""gpt-oss: windows on every other layer, a learned sink logit for each head, experts with biases.

Row of `models/table.py`. A sink logit joins the softmax and has no value: it is a constant of the
kernel, not a row of the cache. Checkpoints in MXFP4 are refused by the config reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm._custom_ops import moe as moe_ops
from vllm.model_executor.layers.biased_experts import BiasedExperts
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.weight_place import Shard, WeightPlace
from vllm.model_executor.models.block_context import BlockContext
from vllm.model_executor.models.blocks import AttentionBlock
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.config_reader import (
    read_attention,
    read_layer_config,
    read_window,
)
from vllm.model_executor.models.shapes import AttentionShape, LayerShape, ModelShape
from vllm.model_executor.models.weight_rows import (
    ATTENTION_ROWS,
    OUTER_ROWS,
    PRE_NORM_ROWS,
    layer_row,
)


class GptOssForCausalLM(CausalLM):
    """gpt-oss, weights in bfloat16 or float32."""

    weight_rows = (
        *OUTER_ROWS,
        *ATTENTION_ROWS,
        *PRE_NORM_ROWS,
        layer_row("self_attn", "attention.sinks"),
        layer_row("mlp.router", "mlp.router"),
        layer_row("mlp.experts", "mlp.experts"),
    )

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""

        def read_layer(layer: int) -> LayerShape:
            own = read_layer_config(config, layer)
            bias = bool(own["attention_bias"])
            window = read_window(config, layer)
            attention = read_attention(own, window=window, qkv_bias=bias, out_bias=bias)
            return LayerShape(attention=SinkAttentionShape(heads=attention), mlp=_read_moe(own))

        return ModelShape(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            max_positions=config["max_position_embeddings"],
            layers=tuple(read_layer(layer) for layer in range(config["num_hidden_layers"])),
            norm_epsilon=config["rms_norm_eps"],
            has_float_norm=True,
            is_tied=bool(config["tie_word_embeddings"]),
        )


def _read_moe(config: Mapping[str, Any]) -> BiasedMoeShape:
    return BiasedMoeShape(
        num_experts=config["num_local_experts"],
        num_chosen=config["num_experts_per_tok"],
        intermediate_size=config["intermediate_size"],
        alpha=float(config.get("swiglu_alpha") or 1.702),
        limit=float(config.get("swiglu_limit") or 7.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkAttentionShape:
    """Attention with a learned sink logit for each head; see PartShape."""

    heads: AttentionShape

    def build(self, layer: int, context: BlockContext) -> nn.Module:
        """See PartShape."""
        return SinkAttentionBlock(layer, self.heads, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasedMoeShape:
    """A router with a bias over experts with biases; see PartShape.

    Attributes:
        num_chosen: experts that a token takes.
        alpha, limit: of the experts' gate, see BiasedExperts.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    alpha: float
    limit: float

    def build(self, layer: int, context: BlockContext) -> nn.Module:
        """See PartShape."""
        return BiasedMoeBlock(self, context)


class SinkLogits(nn.Module):
    """The sink logits of this rank's heads, float32 [H]."""

    fields: ClassVar[tuple[str, ...]] = ("sinks",)

    def __init__(self, num_heads: int, num_total: int, rank: int) -> None:
        super().__init__()
        self._num_total = num_total
        self._start = rank * num_heads
        self.sinks = nn.Parameter(torch.empty(num_heads, dtype=torch.float32), requires_grad=False)

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; there is one shard, None."""
        return WeightPlace(
            shape=(self._num_total,), target=self.sinks.data, axis=0, start=self._start
        )


class SinkAttentionBlock(AttentionBlock):
    """An AttentionBlock whose kernel is given the sink logits."""

    def __init__(self, layer: int, shape: AttentionShape, context: BlockContext) -> None:
        super().__init__(layer, shape, context)
        self.sinks = SinkLogits(self.qkv.num_heads, shape.num_heads, context.tp.rank)
        heads = self.attention
        heads.params = replace(heads.params, sinks=self.sinks.sinks.data)
        heads.query = replace(heads.query, has_sink_logits=True)


class BiasedMoeBlock(nn.Module):
    """The router and its experts; the chosen experts' weights sum to 1."""

    def __init__(self, shape: BiasedMoeShape, context: BlockContext) -> None:
        super().__init__()
        self._tp = context.tp
        self._num_chosen = shape.num_chosen
        self.router = ReplicatedLinear(
            context.hidden_size, shape.num_experts, bias=True, dtype=context.dtype
        )
        self.experts = BiasedExperts(
            shape.num_experts,
            context.hidden_size,
            shape.intermediate_size,
            alpha=shape.alpha,
            limit=shape.limit,
            dtype=context.dtype,
            tp=context.tp,
        )

    def forward(self, x_TE: Tensor) -> Tensor:
        """Return the contribution of the chosen experts, [T, E]."""
        sizes = (x_TE.shape[0], self._num_chosen)
        weights_TK = torch.empty(sizes, dtype=torch.float32, device=x_TE.device)
        ids_TK = torch.empty(sizes, dtype=torch.int32, device=x_TE.device)
        moe_ops.topk_softmax(weights_TK, ids_TK, self.router(x_TE), True)
        return self._tp.all_reduce(self.experts(x_TE, weights_TK, ids_TK))
