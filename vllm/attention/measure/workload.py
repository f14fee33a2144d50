"""The tensors of one step over several layers of one kind, as the engine would hand them down.

All layers share a block table, and their rows lie interleaved in one arena, block after block in
random order. There are enough layers that no cache of the processor holds them from one step to the
next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.attention.backends.abstract import AttentionBackend, AttentionParams, KernelQuery
from vllm.attention.measure.load import Load
from vllm.batch import ForwardBatch, GroupBatch, LayerCache
from vllm.cache_spec import (
    BLOCK_ALIGNMENT_BYTES,
    CacheField,
    Full,
    KVCacheGroup,
    LayerCacheSpec,
    make_group,
)
from vllm.utils.tensors import to_torch_dtype, view_cache_field

COLD_BYTES = 128 << 20
"""Bytes of cache that a step over all layers passes through, well above the L2 of any GPU."""
MAX_LAYERS = 32
_NOISE_ELEMENTS = 1 << 16


def count_layers(query: KernelQuery, load: Load) -> int:
    """Return how many layers make a step long enough to be measured cold."""
    layer_bytes = make_layers(query, 1).block_bytes * _count_blocks(query, load)
    return min(MAX_LAYERS, max(1, -(-COLD_BYTES // layer_bytes)))


def count_arena_bytes(query: KernelQuery, load: Load, num_layers: int) -> int:
    """Return the bytes of the caches of all layers and the pad block."""
    return make_layers(query, num_layers).block_bytes * (_count_blocks(query, load) + 1)


def _count_blocks(query: KernelQuery, load: Load) -> int:
    return load.num_rows * -(-load.seq_len // query.block_tokens)


def make_layers(query: KernelQuery, num_layers: int) -> KVCacheGroup:
    """Return the group of layers that keep every token."""
    shape = (query.num_kv_heads, query.head_size)
    names = ("kv",) if query.has_one_field else ("k", "v")
    fields = tuple(CacheField(name=n, shape=shape, dtype=query.kv_dtype) for n in names)
    specs = [
        LayerCacheSpec(layer=layer, fields=fields, lifetime=Full()) for layer in range(num_layers)
    ]
    return make_group("measured", specs, query.block_tokens)


class Workload:
    """One step that kernels may run again and again.

    Args:
        load: the rows.
        num_layers: layers of the step.
        stated_len: the longest sequence that the step is said to have and its block table has room
            for; a captured step states the longest that the engine serves.
        rows_are_cached: the cache holds the new rows already, as it does in models on a GPU.
    """

    def __init__(
        self,
        query: KernelQuery,
        load: Load,
        *,
        num_layers: int,
        stated_len: int,
        rows_are_cached: bool,
    ) -> None:
        self.num_layers = num_layers
        self._rows_are_cached = rows_are_cached
        self._generator = torch.Generator().manual_seed(0)
        self._device = torch.device(query.device)
        group = make_layers(query, num_layers)
        num_blocks = _count_blocks(query, load)
        arena = self._make_arena((num_blocks + 1) * group.block_bytes, query)
        num_fields = len(group.places) // num_layers
        views = [
            view_cache_field(
                arena, place.field, place.offset_bytes, group.block_bytes, query.block_tokens
            )
            for place in group.places
        ]
        self._caches = [
            LayerCache(group=0, tensors=tuple(views[i * num_fields : (i + 1) * num_fields]))
            for i in range(num_layers)
        ]
        units = group.block_bytes // BLOCK_ALIGNMENT_BYTES
        order = torch.randperm(num_blocks + 1, generator=self._generator)
        self._batch = self._make_batch(query, load, order * units, max(stated_len, load.seq_len))
        self._params = self._make_params(query)
        dtype = to_torch_dtype(query.dtype)
        self._query = self._draw(load.num_tokens, query.num_heads, query.head_size).to(dtype)
        self._key = self._draw(load.num_tokens, query.num_kv_heads, query.head_size).to(dtype)
        self._value = self._key if query.has_one_field else self._key.flip(0)
        self._out = torch.empty_like(self._query)

    def run(self, backend: AttentionBackend, num_layers: int | None = None) -> None:
        """Plan the step and attend in every layer, or in the first few.

        Results are overwritten by the next layer.
        """
        plan = backend.plan(self._batch, 0)
        for cache in self._caches[:num_layers]:
            backend.forward(
                self._out,
                self._query,
                self._key,
                self._value,
                cache,
                self._batch,
                plan,
                self._params,
                rows_are_cached=self._rows_are_cached,
            )

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._device)

    def _make_arena(self, num_bytes: int, query: KernelQuery) -> Tensor:
        """Return uint8 [>= num_bytes] of finite numbers: one piece of noise, repeated."""
        dtype = to_torch_dtype(query.kv_dtype)
        noise = self._draw(_NOISE_ELEMENTS).to(dtype)
        num_pieces = -(-num_bytes // (noise.numel() * noise.element_size()))
        arena = torch.empty(num_pieces, _NOISE_ELEMENTS, dtype=dtype, device=self._device)
        return arena.copy_(noise).view(-1).view(torch.uint8)

    def _make_params(self, query: KernelQuery) -> AttentionParams:
        return AttentionParams(
            scale=query.scale,
            window=query.window,
            sink_tokens=query.sink_tokens,
            chunk_tokens=query.chunk_tokens,
            soft_cap=query.soft_cap,
            sinks=self._draw(query.num_heads) if query.has_sink_logits else None,
        )

    def _make_batch(
        self, query: KernelQuery, load: Load, offsets: Tensor, stated_len: int
    ) -> ForwardBatch:
        """Return the step; the last of `offsets` is the pad block's."""
        tokens = query.block_tokens
        own = offsets[:-1].view(load.num_rows, -1)
        width = -(-stated_len // tokens)
        table = offsets[-1].repeat(load.num_rows, width)
        table[:, : own.shape[1]] = own
        steps = torch.arange(load.num_cached, load.seq_len)
        slots = torch.stack(
            (table[:, steps // tokens], (steps % tokens).expand(load.num_rows, -1)), -1
        ).view(-1, 2)

        def ints(values: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
            return values.to(self._device, dtype)

        return ForwardBatch(
            input_ids=ints(torch.zeros(load.num_tokens), torch.int64),
            positions=ints(steps.repeat(load.num_rows), torch.int64),
            cu_query_lens=ints(torch.arange(load.num_rows + 1) * load.num_new),
            seq_lens=ints(torch.full((load.num_rows,), load.seq_len)),
            logits_rows=ints(torch.empty(0), torch.int64),
            groups=(GroupBatch(block_offsets=ints(table), slots=ints(slots), block_tokens=tokens),),
            max_query_len=load.num_new,
            max_seq_len=stated_len,
            num_decode_rows=load.num_rows if load.num_new == 1 else 0,
            new_lens_cpu=(load.num_new,) * load.num_rows,
            computed_lens_cpu=(load.num_cached,) * load.num_rows,
        )
