"""Attention whose output each head scales by a gate: Qwen3-Next and Qwen3.5.

The gate is a second half of every head's query projection. Built from a `GatedAttentionShape` in
the place of the plain attention of `blocks.py`.

Shapes: T tokens, E hidden size, H and Hkv heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vllm._custom_ops.activation import mul_sigmoid
from vllm.attention.layer import Attention
from vllm.batch import AttentionState, ForwardBatch
from vllm.cache_spec import Full, LayerCacheSpec
from vllm.model_executor.layers.linear import RowParallelLinear, split_kv_heads
from vllm.model_executor.layers.parts import Product
from vllm.model_executor.layers.row_select_linear import RowSelection, RowSelectLinear
from vllm.model_executor.models.block_context import BlockContext
from vllm.model_executor.models.heads import attend_heads
from vllm.model_executor.models.shapes import AttentionShape
from vllm.utils.tensors import from_torch_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedAttentionShape:
    """Softmax attention with an output gate, query and key norms, and no window."""

    attention: AttentionShape

    def build(self, layer: int, context: BlockContext) -> GatedAttention:
        """See PartShape."""
        return GatedAttention(layer, self.attention, context)


def read_gated_attention(config: Mapping[str, Any]) -> GatedAttentionShape:
    """Return the gated attention that a config describes."""
    bias = bool(config["attention_bias"])
    return GatedAttentionShape(
        attention=AttentionShape(
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_size=config["head_dim"],
            scale=config["head_dim"] ** -0.5,
            rope=config["rope_parameters"],
            qkv_bias=bias,
            out_bias=bias,
            has_qk_norm=True,
        )
    )


class GatedAttention(nn.Module):
    """Projections, head norms, rotary embedding, attention and gate of one layer."""

    def __init__(self, layer: int, shape: AttentionShape, context: BlockContext) -> None:
        super().__init__()
        size, tp = shape.head_size, context.tp
        self.head_size = size
        num_heads = tp.split(shape.num_heads, "num_attention_heads")
        num_kv_heads, first_kv_head = split_kv_heads(shape.num_kv_heads, tp)
        self._gate_size = num_heads * size
        kv = RowSelection.of_parts(
            {"": num_kv_heads * size}, {"": first_kv_head * size}, shape.num_kv_heads * size
        )
        self.qkv = RowSelectLinear(
            context.hidden_size,
            {"q": _query_rows(shape, num_heads, tp.rank * num_heads), "k": kv, "v": kv},
            bias=shape.qkv_bias,
            dtype=context.dtype,
        )
        self.q_norm = context.make_norm(size)
        self.k_norm = context.make_norm(size)
        assert shape.rope is not None
        self.rope = context.ropes.get(size, shape.rope)
        self.attention = Attention(
            layer,
            num_heads,
            num_kv_heads,
            size,
            shape.scale,
            Full(),
            dtype=from_torch_dtype(context.dtype),
            cache_dtype=context.cache_dtype,
        )
        self.out = RowParallelLinear(
            shape.num_heads * size,
            context.hidden_size,
            bias=shape.out_bias,
            dtype=context.dtype,
            tp=tp,
        )

    @property
    def spec(self) -> LayerCacheSpec:
        """See Mixer."""
        return self.attention.spec

    @property
    def kernel_layer(self) -> Attention:
        """See Mixer."""
        return self.attention

    def forward(
        self,
        x_TE: Tensor,
        batch: ForwardBatch,
        attention: AttentionState,
        tokens_L: Tensor | None = None,
    ) -> Product:
        """Return what the attention gives to the residual stream; see Mixer."""
        gate_and_qkv = self.qkv(x_TE)
        gate_TC, qkv_TX = gate_and_qkv[:, : self._gate_size], gate_and_qkv[:, self._gate_size :]
        out_TC = attend_heads(
            self.attention, qkv_TX, self.q_norm, self.k_norm, self.rope, batch, attention
        ).flatten(1)
        if out_TC.is_cuda:
            mul_sigmoid(out_TC, gate_TC)
            return self.out.contribute(out_TC, tokens_L)
        # torch.sigmoid rounds an element by its place in memory; exp and division do not.
        gate_TC = 1.0 / (1.0 + torch.exp(-gate_TC.float()))
        return self.out.contribute(out_TC * gate_TC.to(out_TC.dtype), tokens_L)


def _query_rows(shape: AttentionShape, num_heads: int, first_head: int) -> RowSelection:
    """Return this rank's gates and then its queries, which the checkpoint interleaves by head.

    Queries lie beside keys and values, as the op that finishes all three wants them.
    """
    total = shape.num_heads * 2 * shape.head_size
    own = torch.arange(total, device="cpu").view(shape.num_heads, 2, -1)[
        first_head : first_head + num_heads
    ]
    return RowSelection(total=total, rows=own.transpose(0, 1).flip(0).flatten())
