"""Multi-head latent attention: all heads attend to one compressed row a token.

Built by `models/deepseek_v2.py`. A row of the cache holds the latent (what keys and values of all
heads are made from) and the key part with positions, the same for all heads. Attention runs in the
absorbed form for prefill and decode alike: each head's query is brought into the space of the
latents, and what it reads there is brought back by the head's value matrix. To expand cached rows
for prompts would take fewer operations, but other roundings, and the bits of a token would depend
on the chunk that it came in. On a GPU, where they do so anyway, rows with many new tokens are
expanded (`latent_rows.py`).

Shapes: T tokens, E hidden size, H heads of this rank, N size of a head's query without positions,
R size with positions, L size of a latent, V size of a head's value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from vllm._custom_ops.attention import prompt_attention
from vllm._custom_ops.cache import reshape_and_cache
from vllm._custom_ops.latent import join_latents, latent_norm_rope_cache
from vllm.attention.layer import Attention
from vllm.batch import AttentionState, ForwardBatch, LayerCache
from vllm.cache_spec import CacheField, Full, LayerCacheSpec
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.latent_expansion import LatentExpansion, LatentSizes
from vllm.model_executor.layers.latent_rows import LatentRows, count_expanded_keys, cut_rows
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.parts import Product
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.types import DType
from vllm.utils.tensors import from_torch_dtype

LATENT_NORM_EPSILON = 1e-6
"""Of the norms of latents; the config's rms_norm_eps is that of the other norms."""

LATENT_ROWS = "latent rows"
"""Names the plan of a step that says which rows attend to latents, beside those of kernels."""


class LatentAttention(Attention):
    """The attention of one layer over rows that are key and value at once.

    A kernel sees one KV head whose value is its key; the first L elements of what it returns are
    the values, the rest means nothing. The cache is the same on every rank.
    """

    def __init__(
        self,
        layer: int,
        num_heads: int,
        sizes: LatentSizes,
        *,
        dtype: DType,
        cache_dtype: DType | None,
    ) -> None:
        super().__init__(
            layer,
            num_heads,
            1,
            sizes.row,
            sizes.scale,
            Full(),
            dtype=dtype,
            cache_dtype=cache_dtype,
        )
        self._sizes = sizes
        field = CacheField(name="latent", shape=(1, sizes.row), dtype=cache_dtype or dtype)
        self.spec = replace(self.spec, fields=(field,))
        self.query = replace(self.query, has_one_field=True)

    @property
    def sees_all(self) -> bool:
        """Whether a token sees all before it; the expanded form knows no other masks."""
        return not (self.params.window or self.params.chunk_tokens)

    def count_scratch_bytes(self, max_keys: int, max_new_tokens: int) -> int:
        """See Attention; rows are either joined as latents or expanded, not both at once."""
        joined_bytes = super().count_scratch_bytes(max_keys, max_new_tokens)
        num_keys = min(max_keys, count_expanded_keys(max_new_tokens))
        sizes = self._sizes
        made, key = sizes.nope + sizes.value, sizes.nope + sizes.rope
        key_bytes = (sizes.row + self.num_heads * (made + key)) * self.query.dtype.itemsize
        return max(joined_bytes, num_keys * key_bytes)


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
            sizes,
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

    def forward(
        self,
        x_TE: Tensor,
        batch: ForwardBatch,
        attention: AttentionState,
        tokens_L: Tensor | None = None,
    ) -> Product:
        """Return what the attention gives to the residual stream; see Mixer."""
        sizes = self._sizes
        asked = self.query_up(self._project_query(x_TE))
        asked_THD = asked.unflatten(-1, (-1, sizes.nope + sizes.rope))
        row_T1D = self.latent_down(x_TE).unsqueeze(1)
        group = self._find_cache(attention).group
        rows: LatentRows | None = attention.plans.get((group, LATENT_ROWS))
        value_THV = asked_THD.new_empty(*asked_THD.shape[:2], sizes.value)
        if rows is None or rows.expanded is None:
            query_THD = asked_THD.new_empty(*asked_THD.shape[:2], sizes.row)
            self._place_rows(asked_THD, row_T1D, query_THD[:, :, sizes.latent :], batch, attention)
            self.attend_absorbed(value_THV, asked_THD, query_THD, row_T1D, batch, attention)
            return self.out.contribute(value_THV.flatten(1), tokens_L)
        self._place_rows(asked_THD, row_T1D, asked_THD[:, :, sizes.nope :], batch, attention)
        num_tokens = 0
        if rows.absorbed is not None:
            num_tokens = rows.absorbed.positions.shape[0]
            asked = asked_THD[:num_tokens]
            query_THD = asked.new_empty(*asked.shape[:2], sizes.row)
            query_THD[:, :, sizes.latent :] = asked[:, :, sizes.nope :]
            own = row_T1D[:num_tokens]
            self.attend_absorbed(
                value_THV[:num_tokens], asked, query_THD, own, rows.absorbed, rows.state
            )
        self.attend_expanded(
            value_THV[num_tokens:], asked_THD[num_tokens:], row_T1D[num_tokens:], rows, attention
        )
        return self.out.contribute(value_THV.flatten(1), tokens_L)

    def plan_rows(self, batch: ForwardBatch, attention: AttentionState) -> LatentRows:
        """Return how the rows of a step are served by all layers of these sizes."""
        return cut_rows(batch, attention, self._sizes, self.attention.kernel)

    def _place_rows(
        self,
        asked_THD: Tensor,
        row_T1D: Tensor,
        turned_THR: Tensor,
        batch: ForwardBatch,
        attention: AttentionState,
    ) -> None:
        """Norm, turn and store the rows, and turn the queries' last R elements into `turned`."""
        sizes = self._sizes
        asked_THR = asked_THD[:, :, sizes.nope :]
        cache = self._find_cache(attention)
        field, slots = cache.tensors[0], batch.groups[cache.group].slots
        if can_fuse(row_T1D, field, sizes):
            latent_norm_rope_cache(
                row_T1D[:, 0],
                asked_THR,
                turned_THR,
                batch.positions,
                slots,
                field,
                self.latent_norm.weight,
                self.latent_norm.epsilon,
                self.rope.cos_sin,
                self.rope.is_neox,
            )
            return
        self.latent_norm.apply_in_place(row_T1D[:, :, : sizes.latent])
        self.rope(batch.positions, asked_THR, row_T1D[:, :, sizes.latent :])
        reshape_and_cache(row_T1D, row_T1D, field, field, slots)
        turned_THR.copy_(asked_THR)

    def _find_cache(self, attention: AttentionState) -> LayerCache:
        cache = attention.caches[self.attention.layer]
        assert cache is not None, f"layer {self.attention.layer} has no cache bound to it"
        return cache

    def attend_absorbed(
        self,
        value_THV: Tensor,
        asked_THD: Tensor,
        query_THD: Tensor,
        row_T1D: Tensor,
        batch: ForwardBatch,
        attention: AttentionState,
    ) -> None:
        """Attend to latents.

        Args:
            value_THV: overwritten.
            asked_THD: queries of N + R elements.
            query_THD: [T, H, L + R], whose last R elements are the queries'; the others are
                overwritten.
            row_T1D: rows of the cache, stored.
            batch: the step.
            attention: caches of all layers.
        """
        sizes = self._sizes
        self.expansion.absorb_query(asked_THD[:, :, : sizes.nope], query_THD[:, :, : sizes.latent])
        read_THD = self.attention(
            query_THD, row_T1D, row_T1D, batch, attention, rows_are_cached=True
        )
        self.expansion.expand_value(read_THD[:, :, : sizes.latent], value_THV)

    def attend_expanded(
        self,
        value_THV: Tensor,
        asked_THD: Tensor,
        row_T1D: Tensor,
        rows: LatentRows,
        attention: AttentionState,
    ) -> None:
        """Attend to keys and values of each head.

        Args:
            value_THV: overwritten.
            asked_THD: queries of N + R elements.
            row_T1D: rows of the cache.
            rows: the step's, some of which are expanded.
            attention: caches of all layers.
        """
        batch, keys = rows.expanded, rows.keys
        assert batch is not None
        row_SD = row_T1D[:, 0]
        if keys is not None:
            cache = self._find_cache(attention)
            row_SD = row_T1D.new_empty(keys.num_keys, row_T1D.shape[2])
            join_latents(
                row_SD,
                row_T1D[:, 0],
                cache.tensors[0],
                batch.groups[cache.group].block_offsets,
                batch.cu_query_lens,
                batch.seq_lens,
                keys.cu_key_lens,
                keys.max_key_len,
            )
        key_SHD, value_SHV = self.expansion.expand_rows(row_SD)
        prompt_attention(
            value_THV,
            asked_THD,
            key_SHD,
            value_SHV,
            batch.cu_query_lens,
            batch.max_query_len,
            self._sizes.scale,
            None if keys is None else keys.cu_key_lens,
            rows.equal_len,
        )

    def _project_query(self, x_TE: Tensor) -> Tensor:
        if self.query_down is None or self.query_norm is None:
            return x_TE
        return self.query_norm.apply_in_place(self.query_down(x_TE))


def plan_latents(
    layers: Sequence[LatentAttentionBlock], batch: ForwardBatch, attention: AttentionState
) -> AttentionState:
    """Return a step's plans and, where rows may be expanded, which of them are.

    Args:
        layers: those of a model, which have the same sizes.
        batch: the step.
        attention: what the kernels have planned for it.
    """
    expanding = [layer for layer in layers if layer.attention.sees_all]
    if not expanding or not can_expand(batch.positions):
        return attention
    rows = expanding[0].plan_rows(batch, attention)
    caches = (attention.caches[layer.attention.layer] for layer in expanding)
    plans = {(cache.group, LATENT_ROWS): rows for cache in caches if cache is not None}
    return replace(attention, plans={**attention.plans, **plans})


def can_expand(tensor: Tensor) -> bool:
    """Whether there is a kernel for expanded prompts where a step runs."""
    return tensor.is_cuda


def can_fuse(row_T1D: Tensor, cache: Tensor, sizes: LatentSizes) -> bool:
    """Whether one op norms, turns and stores the rows."""
    is_power = sizes.rope & (sizes.rope - 1) == 0
    return row_T1D.is_cuda and is_power and cache.dtype == row_T1D.dtype
