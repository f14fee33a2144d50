"""The load-time proof that a kernel reads and writes a strided arena.

The selector runs it once for each (kernel, query) before it trusts a kernel: a tiny arena filled
with NaN, three sequences in scattered blocks, in one call; the result must equal the kernel
`torch`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from vllm.attention.backends.abstract import AttentionParams, KernelQuery
from vllm.attention.backends.table import load_backend
from vllm.batch import ForwardBatch, GroupBatch, LayerCache
from vllm.cache_spec import BLOCK_ALIGNMENT_BYTES, CacheField, Full, LayerCacheSpec, make_group
from vllm.types import DType
from vllm.utils.tensors import to_torch_dtype, view_cache_field

_ORACLE = "torch"
_TOLERANCE = {DType.FLOAT32: 1e-4, DType.BFLOAT16: 3e-2, DType.FLOAT16: 5e-3}
_LEAD_BYTES = 3 * BLOCK_ALIGNMENT_BYTES  # blocks need not start at offset 0
_GAP_UNITS = 1  # nor follow each other without a gap


@cache
def find_probe_fault(name: str, query: KernelQuery) -> str | None:
    """Return None if the kernel agrees with the oracle on a strided arena, else what went wrong."""
    if name == _ORACLE:
        return None
    expected = run_probe(_ORACLE, query)
    found = run_probe(name, query)
    gap = (found - expected).abs().max().item()
    if gap <= _TOLERANCE[query.dtype]:  # false for NaN
        return None
    return f"the probe of strided caches is off by {gap:.3g} (allowed {_TOLERANCE[query.dtype]:g})"


def run_probe(name: str, query: KernelQuery) -> Tensor:
    """Prefill two sequences beside decoding a third on an arena of NaN; float32 [T, H, D]."""
    backend = load_backend(name)
    generator = torch.Generator().manual_seed(0)
    tokens = query.block_tokens
    computed, new = (tokens + 1, 0, 2), (1, 3, tokens)
    dtype = to_torch_dtype(query.dtype)
    num_new = sum(new)

    def draw(heads: int) -> Tensor:
        values = torch.randn(num_new, heads, query.head_size, generator=generator)
        return values.to(query.device, dtype)

    params = AttentionParams(
        scale=query.scale,
        window=query.window,
        sink_tokens=query.sink_tokens,
        chunk_tokens=query.chunk_tokens,
        soft_cap=query.soft_cap,
        sinks=torch.randn(query.num_heads, generator=generator).to(query.device)
        if query.has_sink_logits
        else None,
    )
    cache, batch = _make_batch(query, computed, new)
    for field in cache.tensors:
        for row, length in enumerate(computed):
            for position in range(length):
                block = batch.groups[0].block_offsets[row, position // tokens]
                field[block, position % tokens] = torch.randn(
                    query.num_kv_heads, query.head_size, generator=generator
                ).to(field)
    q, k = draw(query.num_heads), draw(query.num_kv_heads)
    v = k if query.has_one_field else draw(query.num_kv_heads)
    out = torch.full_like(q, float("nan"))
    backend.forward(out, q, k, v, cache, batch, backend.plan(batch, 0), params)
    return out.float()


def _make_batch(
    query: KernelQuery, computed: tuple[int, ...], new: tuple[int, ...]
) -> tuple[LayerCache, ForwardBatch]:
    tokens, device = query.block_tokens, query.device
    shape = (query.num_kv_heads, query.head_size)
    names = ("kv",) if query.has_one_field else ("k", "v")
    fields = tuple(CacheField(name=n, shape=shape, dtype=query.kv_dtype) for n in names)
    spec = LayerCacheSpec(layer=0, fields=fields, lifetime=Full())
    group = make_group("probe", [spec], tokens)
    units = group.block_bytes // BLOCK_ALIGNMENT_BYTES + _GAP_UNITS
    width = 2 + max(c + n for c, n in zip(computed, new, strict=True)) // tokens
    num_blocks = width * len(computed)
    arena = torch.full(
        (_LEAD_BYTES + (num_blocks + 1) * units * BLOCK_ALIGNMENT_BYTES,),
        0xFF,  # NaN in every float type
        dtype=torch.uint8,
        device=device,
    )
    cache = LayerCache(
        group=0,
        tensors=tuple(
            view_cache_field(arena, place.field, place.offset_bytes, group.block_bytes, tokens)
            for place in group.places
        ),
    )
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
    offsets = (_LEAD_BYTES // BLOCK_ALIGNMENT_BYTES + order * units).to(torch.int32)
    block_offsets = offsets.view(len(computed), width).to(device)
    rows = [r for r, n in enumerate(new) for _ in range(n)]
    positions = [c + i for c, n in zip(computed, new, strict=True) for i in range(n)]
    slots = [
        [int(block_offsets[r, p // tokens]), p % tokens]
        for r, p in zip(rows, positions, strict=True)
    ]
    starts = [0]
    for n in new:
        starts.append(starts[-1] + n)

    def ints(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    lens = [c + n for c, n in zip(computed, new, strict=True)]
    return cache, ForwardBatch(
        input_ids=ints([0] * len(rows), torch.int64),
        positions=ints(positions, torch.int64),
        cu_query_lens=ints(starts),
        seq_lens=ints(lens),
        logits_rows=ints([], torch.int64),
        groups=(GroupBatch(block_offsets=block_offsets, slots=ints(slots), block_tokens=tokens),),
        max_query_len=max(new),
        max_seq_len=max(lens),
        num_decode_rows=1,
    )
