"""Cached rows and new ones laid behind each other, for prompts that see many of both.

Called by `attention.py` and `latent.py`. A long prompt reads each of its rows once for every query
tile and head; one copy into rows that need neither a block table nor a choice of source costs less
than a hundredth of that.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.attention_args import AttentionArgs, JoinedRows, PrefixRows
from vllm._custom_ops.triton.attention_shape import PREFIX_ALIGNMENT
from vllm._custom_ops.triton.launch import fast_launch
from vllm.utils.math import cdiv, next_power

_BLOCK_P = 16
_MAX_BLOCK_E = 1024


@fast_launch
@triton.jit(
    do_not_specialize=["first_row", "table_stride"],
    do_not_specialize_on_alignment=["block_offsets", "cu_query_lens", "seq_lens"],
)
def _join_kernel(
    joined_key,
    joined_value,
    key_cache,
    value_cache,
    fresh_key,
    fresh_value,
    block_offsets,
    cu_query_lens,
    seq_lens,
    cu_key_lens,
    first_row,
    table_stride,
    unit_stride,
    token_stride,
    fresh_token_stride,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_FRESH: tl.constexpr,
    HAS_ONE_FIELD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """One (BLOCK_P rows, sequence): the last rows of the sequence, in their order.

    With an ALIGNMENT those behind its first multiple that no cached row lies behind are left out.
    """
    row = tl.program_id(1) + first_row
    start = tl.load(cu_key_lens + row)
    num_keys = tl.load(cu_key_lens + row + 1) - start
    in_row = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    if tl.program_id(0) * BLOCK_P >= num_keys:
        return
    seq_len, token = tl.load(seq_lens + row), tl.load(cu_query_lens + row)
    num_cached = seq_len
    if HAS_FRESH:
        num_cached -= tl.load(cu_query_lens + row + 1) - token
    end = seq_len
    if ALIGNMENT:
        end = tl.minimum(tl.cdiv(num_cached, ALIGNMENT) * ALIGNMENT, seq_len)
    position = end - num_keys + in_row
    is_row = in_row < num_keys
    is_cached = is_row & (position < num_cached)
    table = block_offsets + row.to(tl.int64) * table_stride
    unit = tl.load(table + position // BLOCK_TOKENS, mask=is_cached, other=0)
    source = unit.to(tl.int64) * unit_stride + position % BLOCK_TOKENS * token_stride
    fresh = (token + position - num_cached).to(tl.int64) * fresh_token_stride
    target = (start + in_row).to(tl.int64) * WIDTH
    for first in tl.static_range(0, WIDTH, BLOCK_E):
        element = first + tl.arange(0, BLOCK_E)[None, :]
        is_read = is_row[:, None] & (element < WIDTH)
        key_rows = key_cache + source
        if HAS_FRESH:
            key_rows = tl.where(is_cached, key_rows, fresh_key + fresh)
        rows = tl.load(key_rows[:, None] + element, mask=is_read, other=0.0)
        tl.store(joined_key + target[:, None] + element, rows, mask=is_read)
        if not HAS_ONE_FIELD:
            value_rows = value_cache + source
            if HAS_FRESH:
                value_rows = tl.where(is_cached, value_rows, fresh_value + fresh)
            rows = tl.load(value_rows[:, None] + element, mask=is_read, other=0.0)
            tl.store(joined_value + target[:, None] + element, rows, mask=is_read)


def can_join(args: AttentionArgs) -> bool:
    """Return whether all heads of a row lie behind each other, in the cache and among new rows."""
    cache, key, value = args.key_cache, args.fresh_key, args.fresh_value
    if cache is None or args.sink_tokens or args.chunk_tokens:
        return False
    head_size = cache.shape[3]
    if cache.shape[2] > 1 and cache.stride(2) != head_size:
        return False
    if key is None or value is None:
        return True
    is_tight = key.shape[1] == 1 or key.stride(1) == head_size
    return is_tight and key.stride() == value.stride()


def join_rows(
    args: AttentionArgs, joined: JoinedRows, first_row: int, num_rows: int
) -> AttentionArgs:
    """Return arguments without a cache: rows `first_row` … see new rows, perhaps behind a prefix.

    Args:
        args: such that `can_join`.
        joined: which rows those are.
    """
    cache = args.key_cache
    assert cache is not None and args.value_cache is not None and args.block_offsets is not None
    num_kv_heads, head_size = cache.shape[2:]
    key = cache.new_empty(joined.num_keys, num_kv_heads, head_size)
    value = key if args.has_one_field else cache.new_empty(key.shape)
    fresh_key = cache if args.fresh_key is None else args.fresh_key
    fresh_value = cache if args.fresh_value is None else args.fresh_value
    launch_join(
        (key, value, cache, args.value_cache, fresh_key, fresh_value),
        (args.block_offsets, args.cu_query_lens, args.seq_lens, joined.cu_key_lens),
        max_key_len=joined.max_key_len,
        first_row=first_row,
        num_rows=num_rows,
        has_fresh=args.fresh_key is not None,
        has_one_field=args.has_one_field,
        alignment=0 if joined.has_new else PREFIX_ALIGNMENT,
    )
    if not joined.has_new:
        prefix = PrefixRows(key=key, value=value, cu_lens=joined.cu_key_lens)
        return replace(args, key_cache=None, value_cache=None, block_offsets=None, prefix=prefix)
    return replace(
        args,
        key_cache=None,
        value_cache=None,
        block_offsets=None,
        fresh_key=key,
        fresh_value=value,
        cu_key_lens=joined.cu_key_lens,
    )


def launch_join(
    rows: tuple[Tensor, ...],
    places: tuple[Tensor, ...],
    *,
    max_key_len: int,
    first_row: int,
    num_rows: int,
    has_fresh: bool,
    has_one_field: bool,
    alignment: int = 0,
) -> None:
    """Copy rows.

    Args:
        rows: joined K and V, their caches, new K and V.
        places: block table, cumulative new tokens, lengths, cumulative keys.
        max_key_len: no sequence has more keys.
        first_row: the first sequence of those that are joined.
        num_rows: their number.
        has_fresh: whether new rows are given.
        has_one_field: whether K is V.
        alignment: of the positions behind which new rows stay where they are; 0 is none.
    """
    cache, fresh = rows[2], rows[4]
    width = cache.shape[2] * cache.shape[3]
    _join_kernel[(cdiv(max_key_len, _BLOCK_P), num_rows)](
        *rows,
        *places,
        first_row,
        places[0].stride(0),
        *cache.stride()[:2],
        fresh.stride(0),
        WIDTH=width,
        BLOCK_P=_BLOCK_P,
        BLOCK_E=min(next_power(width), _MAX_BLOCK_E),
        BLOCK_TOKENS=cache.shape[1],
        HAS_FRESH=has_fresh,
        HAS_ONE_FIELD=has_one_field,
        ALIGNMENT=alignment,
    )
