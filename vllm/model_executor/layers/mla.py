"""Multi-head latent attention: all heads attend to one compressed row a token.

Built by `models/deepseek_v2.py`. A row of the cache holds the latent (what keys and values of all
heads are made from) and the key part with positions, the same for all heads. Attention runs in the
absorbed form for prefill and decode alike: each head's query is brought into the space of the
latents, and what it reads there is brought back by the head's value matrix. To expand cached rows
for prompts would take fewer operations, but other roundings, and the bits of a token would depend
on the chunk that it came in. On a GPU, where they do so anyway, whole long prompts are expanded.

Shapes: T tokens, E hidden size, H heads of this rank, N size of a head's query without positions,
R size with positions, L size of a latent, V size of a head's value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm._custom_ops import linear as linear_ops
from vllm._custom_ops.attention import prompt_attention
from vllm._custom_ops.cache import reshape_and_cache
from vllm.attention.backends.paged_attn import PagedAttention
from vllm.attention.layer import Attention
from vllm.attention.split_batch import split_batch
from vllm.batch import AttentionState, ForwardBatch
from vllm.cache_spec import CacheField, Full, LayerCacheSpec
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.weight_place import PackedModule, Shard, WeightPlace
from vllm.types import DType
from vllm.utils.tensors import from_torch_dtype

LATENT_NORM_EPSILON = 1e-6
"""Of the norms of latents; the config's rms_norm_eps is that of the other norms."""

MIN_EXPANDED_TOKENS = 256
"""Of the longest prompt of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Sizes of multi-head latent attention, over all ranks.

    Attributes:
        query_rank: size that queries are made from, or None if from the hidden states.
        latent: L above.
        nope, rope: N and R above.
        value: V above.
        scale: factor of the logits.
        rope_settings: rope settings of the config.
        bias: whether the projections into latents and out of values have biases.
    """

    hidden_size: int
    num_heads: int
    query_rank: int | None
    latent: int
    nope: int
    rope: int
    value: int
    scale: float
    rope_settings: Mapping[str, Any]
    bias: bool

    @property
    def row(self) -> int:
        """Elements of a cached row."""
        return self.latent + self.rope


class LatentExpansion(PackedModule):
    """The matrix from latents to keys and values of this rank's heads, taken apart by head.

    Attributes:
        weight: [H (N + V), L], a head's key rows, then its value rows; None once packed.
    """

    fields: ClassVar[tuple[str, ...]] = ("weight",)
    key_packed: Tensor | None
    value_packed: Tensor | None

    def __init__(
        self, num_heads: int, sizes: LatentSizes, *, dtype: torch.dtype, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self._sizes = sizes
        self._rows = num_heads * (sizes.nope + sizes.value)
        self._total = sizes.num_heads * (sizes.nope + sizes.value)
        self._rank = tp.rank
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(self._rows, sizes.latent, dtype=dtype), requires_grad=False
        )
        self.register_buffer("key_packed", None, persistent=False)
        self.register_buffer("value_packed", None, persistent=False)

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; there is one shard, None."""
        assert self.weight is not None
        return WeightPlace(
            shape=(self._total, self._sizes.latent),
            target=self.weight.data,
            axis=0,
            start=self._rank * self._rows,
        )

    def pack(self) -> None:
        """Bring the heads' matrices into the CPU kernel's layout, free the original."""
        if self.weight is None or self.weight.device.type != "cpu":
            return
        keys_HNL, values_HVL = self._split()
        self.key_packed = _pack_heads(keys_HNL.transpose(1, 2))
        self.value_packed = _pack_heads(values_HVL)
        self.weight = None

    def absorb_query(self, query_THN: Tensor, out_THL: Tensor) -> None:
        """Write each head's query in the space of the latents."""
        if self.key_packed is None:
            keys_HNL, _ = self._split()
            torch.bmm(query_THN.transpose(0, 1), keys_HNL, out=out_THL.transpose(0, 1))
            return
        for head in range(self.num_heads):
            linear_ops.linear(out_THL[:, head], query_THN[:, head], self.key_packed[head])

    def expand_value(self, read_THL: Tensor) -> Tensor:
        """Return the values that the heads have read as latents, [T, H, V]."""
        out_THV = read_THL.new_empty(read_THL.shape[0], self.num_heads, self._sizes.value)
        if self.value_packed is None:
            _, values_HVL = self._split()
            out_HTV = out_THV.transpose(0, 1)
            torch.bmm(read_THL.transpose(0, 1), values_HVL.transpose(1, 2), out=out_HTV)
            return out_THV
        for head in range(self.num_heads):
            linear_ops.linear(out_THV[:, head], read_THL[:, head], self.value_packed[head])
        return out_THV

    def expand_rows(self, row_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all heads, both [T, H, N + R], from rows of the cache.

        A value has V elements and then zeros, so that it is as long as a key. Needs the matrix as
        loaded.
        """
        assert self.weight is not None, "the matrix is packed"
        sizes = self._sizes
        made_TX = torch.nn.functional.linear(row_TD[:, : sizes.latent], self.weight)
        made_THX = made_TX.unflatten(1, (self.num_heads, -1))
        key_THD = row_TD.new_empty(len(row_TD), self.num_heads, sizes.nope + sizes.rope)
        key_THD[:, :, : sizes.nope] = made_THX[:, :, : sizes.nope]
        key_THD[:, :, sizes.nope :] = row_TD[:, None, sizes.latent :]
        value_THD = key_THD.new_zeros(key_THD.shape)
        value_THD[:, :, : sizes.value] = made_THX[:, :, sizes.nope :]
        return key_THD, value_THD

    def _split(self) -> tuple[Tensor, Tensor]:
        assert self.weight is not None
        both = self.weight.data.unflatten(0, (self.num_heads, -1))
        keys_HNL, values_HVL = both.split((self._sizes.nope, self._sizes.value), dim=1)
        return keys_HNL, values_HVL


class LatentAttention(Attention):
    """The attention of one layer over rows that are key and value at once.

    A kernel sees one KV head whose value is its key; the first L elements of what it returns are
    the values, the rest means nothing. The cache is the same on every rank.
    """

    def __init__(
        self,
        layer: int,
        num_heads: int,
        row_size: int,
        scale: float,
        *,
        dtype: DType,
        cache_dtype: DType | None,
    ) -> None:
        super().__init__(
            layer, num_heads, 1, row_size, scale, Full(), dtype=dtype, cache_dtype=cache_dtype
        )
        field = CacheField(name="latent", shape=(1, row_size), dtype=cache_dtype or dtype)
        self.spec = replace(self.spec, fields=(field,))
        self.query = replace(self.query, has_one_field=True)


class LatentAttentionBlock(nn.Module):
    """Projections, rotary positions and attention of one layer; a Mixer of `models/blocks.py`.

    Args:
        rope: table for a head of R elements.
    """

    def __init__(
        self,
        layer: int,
        sizes: LatentSizes,
        rope: RotaryEmbedding,
        *,
        dtype: torch.dtype,
        cache_dtype: DType | None,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self._sizes = sizes
        self.rope = rope
        hidden, query_size = sizes.hidden_size, sizes.num_heads * (sizes.nope + sizes.rope)
        num_heads = tp.split(sizes.num_heads, "num_attention_heads")
        self.query_down: ReplicatedLinear | None = None
        self.query_norm: RMSNorm | None = None
        query_input = hidden
        if sizes.query_rank is not None:
            query_input = sizes.query_rank
            self.query_down = ReplicatedLinear(hidden, query_input, bias=sizes.bias, dtype=dtype)
            self.query_norm = RMSNorm(query_input, LATENT_NORM_EPSILON, dtype)
        self.query_up = ColumnParallelLinear(
            query_input, query_size, bias=False, dtype=dtype, tp=tp
        )
        self.latent_down = ReplicatedLinear(hidden, sizes.row, bias=sizes.bias, dtype=dtype)
        self.latent_norm = RMSNorm(sizes.latent, LATENT_NORM_EPSILON, dtype)
        self.expansion = LatentExpansion(num_heads, sizes, dtype=dtype, tp=tp)
        self.out = RowParallelLinear(
            sizes.num_heads * sizes.value, hidden, bias=sizes.bias, dtype=dtype, tp=tp
        )
        self.attention = LatentAttention(
            layer,
            num_heads,
            sizes.row,
            sizes.scale,
            dtype=from_torch_dtype(dtype),
            cache_dtype=cache_dtype,
        )

    @property
    def spec(self) -> LayerCacheSpec:
        """See Mixer."""
        return self.attention.spec

    @property
    def kernel_layer(self) -> Attention:
        """See Mixer."""
        return self.attention

    def forward(self, x_TE: Tensor, batch: ForwardBatch, attention: AttentionState) -> Tensor:
        """Return the attention's contribution to the residual stream, [T, E]."""
        sizes = self._sizes
        asked = self.query_up(self._project_query(x_TE))
        asked_THD = asked.unflatten(-1, (-1, sizes.nope + sizes.rope))
        row_T1D = self.latent_down(x_TE).unsqueeze(1)
        self.latent_norm.apply_in_place(row_T1D[:, :, : sizes.latent])
        self.rope(batch.positions, asked_THD[:, :, sizes.nope :], row_T1D[:, :, sizes.latent :])
        num_rows = batch.seq_lens.shape[0]
        num_absorbed = count_absorbed_rows(batch, sizes) if can_expand(x_TE) else num_rows
        if num_absorbed == num_rows:
            value_THV = self.attend_absorbed(asked_THD, row_T1D, batch, attention)
        elif num_absorbed == 0:
            value_THV = self.attend_expanded(asked_THD, row_T1D, batch, attention)
        else:
            value_THV = self.attend_split(asked_THD, row_T1D, batch, attention, num_absorbed)
        return self.out(value_THV.flatten(1))

    def attend_absorbed(
        self, asked_THD: Tensor, row_T1D: Tensor, batch: ForwardBatch, attention: AttentionState
    ) -> Tensor:
        """Store the rows and attend to latents, [T, H, V]; arguments as in `attend_expanded`."""
        sizes = self._sizes
        query_THD = asked_THD.new_empty(*asked_THD.shape[:2], sizes.row)
        self.expansion.absorb_query(asked_THD[:, :, : sizes.nope], query_THD[:, :, : sizes.latent])
        query_THD[:, :, sizes.latent :] = asked_THD[:, :, sizes.nope :]
        read_THD = self.attention(query_THD, row_T1D, row_T1D, batch, attention)
        return self.expansion.expand_value(read_THD[:, :, : sizes.latent])

    def attend_split(
        self,
        asked_THD: Tensor,
        row_T1D: Tensor,
        batch: ForwardBatch,
        attention: AttentionState,
        num_absorbed: int,
    ) -> Tensor:
        """Attend to latents in the first `num_absorbed` rows, expand the others, [T, H, V]."""
        head, tail = split_batch(batch, num_absorbed)
        num_tokens = head.positions.shape[0]
        keys = [key for key in attention.plans if key[1] == self.attention.kernel]
        own = replace(attention, plans=PagedAttention.plan(head, keys))
        return torch.cat(
            (
                self.attend_absorbed(asked_THD[:num_tokens], row_T1D[:num_tokens], head, own),
                self.attend_expanded(asked_THD[num_tokens:], row_T1D[num_tokens:], tail, attention),
            )
        )

    def attend_expanded(
        self, asked_THD: Tensor, row_T1D: Tensor, batch: ForwardBatch, attention: AttentionState
    ) -> Tensor:
        """Store the rows of whole prompts and attend to keys and values of each head, [T, H, V].

        Args:
            asked_THD: queries of N + R elements.
            row_T1D: rows of the cache.
            batch: a step of whole prompts.
            attention: caches of all layers.
        """
        cache = attention.caches[self.attention.layer]
        assert cache is not None, f"layer {self.attention.layer} has no cache bound to it"
        field = cache.tensors[0]
        reshape_and_cache(row_T1D, row_T1D, field, field, batch.groups[cache.group].slots)
        key_THD, value_THD = self.expansion.expand_rows(row_T1D[:, 0])
        read_THD = torch.empty_like(key_THD)
        prompt_attention(
            read_THD,
            asked_THD,
            key_THD,
            value_THD,
            batch.cu_query_lens,
            batch.max_query_len,
            self._sizes.scale,
        )
        return read_THD[:, :, : self._sizes.value]

    def _project_query(self, x_TE: Tensor) -> Tensor:
        if self.query_down is None or self.query_norm is None:
            return x_TE
        return self.query_norm.apply_in_place(self.query_down(x_TE))


def can_expand(x_TE: Tensor) -> bool:
    """Whether there is a kernel for expanded prompts where a step runs."""
    return x_TE.is_cuda


def count_absorbed_rows(batch: ForwardBatch, sizes: LatentSizes) -> int:
    """Return how many leading rows attend to latents; those behind them are whole prompts.

    Prompts are expanded where the longest of them is long enough for the saved operations to pay
    the launches. Rows that read cached tokens never are.
    """
    num_rows = batch.seq_lens.shape[0]
    if sizes.value > sizes.nope + sizes.rope or not batch.computed_lens_cpu:
        return num_rows
    first = num_rows
    while first > 0 and batch.computed_lens_cpu[first - 1] == 0:
        first -= 1
    longest = max(batch.new_lens_cpu[first:], default=0)
    return first if longest >= MIN_EXPANDED_TOKENS else num_rows


def _pack_heads(weight_HNK: Tensor) -> Tensor:
    """Pack each head's matrix into one stack."""
    count, rows, columns = weight_HNK.shape
    packed = linear_ops.empty_packed(rows, columns, weight_HNK.dtype, count=count)
    for head in range(count):
        linear_ops.pack_linear_weight(weight_HNK[head].contiguous(), packed[head])
    return packed
