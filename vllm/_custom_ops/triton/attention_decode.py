"""Attention of rows with few new tokens: split over the keys, folded by the last split to end.

Called by `attention.py`, for decode rows and for short ends of long prompts. A program serves one
(row, KV head, split) with all query heads of that KV head, of as many tokens as its tile holds, so
that a K or V row is read once (Dao et al., "Flash-Decoding for long-context inference", 2023). The
number of splits comes from shapes alone, the work of each from the row's length on the device: a
launch captured for the longest rows serves short ones, whose needless splits end at once, and a row
much longer than the others of its batch takes the splits that those do without.

At few rows a launch is a chain of loads and of instructions, not of bytes. So what is likely needed
is asked for before the lengths are known, no integer is divided on the way, splits with work start
first, and what they leave is folded without a barrier.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.arrival import NUM_COUNTERS, get_counters
from vllm._custom_ops.triton.attention_args import AttentionArgs
from vllm._custom_ops.triton.attention_pieces import (
    NOTHING,
    attend_tile,
    load_pieces,
    load_units,
    scale_pieces,
    store_pieces,
    zero_pieces,
)
from vllm._custom_ops.triton.attention_shape import (
    LONG_SPLIT,
    VALUE_PART,
    Splits,
    Tile,
    count_splits,
    cut_tile,
    fit_chunk_tile,
    fit_decode_tile,
    split_head,
)
from vllm._custom_ops.triton.attention_splits import (
    find_group,
    fold_splits,
    is_last_split,
    load_sinks,
    store_split,
    take_tiles,
)
from vllm._custom_ops.triton.attention_tile import (
    count_tiles,
    first_visible,
    point_rows,
    sees,
    tile_start,
)
from vllm._custom_ops.triton.device import count_processors
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm.utils.math import cdiv


@triton.jit
def _read_row(index, rows, cu_query_lens, seq_lens):
    """Return (row, its first new token, new tokens, length), loaded at once."""
    row = index if rows is None else tl.load(rows + index)
    token = tl.load(cu_query_lens + row, eviction_policy="evict_last")
    next_token = tl.load(cu_query_lens + row + 1, eviction_policy="evict_last")
    return row, token, next_token - token, tl.load(seq_lens + row, eviction_policy="evict_last")


@triton.jit
def _name_pairs(pair, query_len, kv_head, GROUP: tl.constexpr, IS_DECODE: tl.constexpr):
    """Return of pairs of new token and query head (which there are, heads, tokens in the row)."""
    is_pair = pair < query_len * GROUP
    if IS_DECODE:
        return is_pair, kv_head * GROUP + pair, 0
    else:
        return is_pair, kv_head * GROUP + pair % GROUP, pair // GROUP


_VARYING = [
    "window",
    "sink_tokens",
    "chunk_tokens",
    "num_splits",
    "even_splits",
    "tiles_per_kv_head",
    "table_stride",
    "num_tokens",
]


@fast_launch
@triton.jit(do_not_specialize=_VARYING)
def _decode_kernel(
    out,
    query,
    key_cache,
    value_cache,
    fresh_key,
    fresh_value,
    block_offsets,
    cu_query_lens,
    seq_lens,
    sinks,
    rows,
    partial,
    tops,
    arrivals,
    scale,
    soft_cap,
    window,
    sink_tokens,
    chunk_tokens,
    num_splits,
    even_splits,
    tiles_per_kv_head,
    table_stride,
    num_tokens,
    out_token_stride,
    out_head_stride,
    query_token_stride,
    query_head_stride,
    unit_stride,
    token_stride,
    head_stride,
    fresh_token_stride,
    fresh_head_stride,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    PARTS: tl.constexpr,
    VALUE_MAIN: tl.constexpr,
    VALUE_TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_FRESH: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ONE_FIELD: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    LONG_TILES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One (KV head with BLOCK_M pairs of new token and query head, and one of PARTS of its values;
    row; split). Splits without work start last.
    """
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    IS_DECODE: tl.constexpr = rows is None
    SIZE: tl.constexpr = VALUE_MAIN + VALUE_TAIL
    head_tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    index, split = tl.program_id(1), tl.program_id(2)
    chunk_tokens = (1 << 30) if chunk_tokens is None else chunk_tokens
    sink_tokens = 0 if sink_tokens is None else sink_tokens
    tiles_per_kv_head = (GROUP + BLOCK_M - 1) // BLOCK_M if IS_DECODE else tiles_per_kv_head
    kv_head, pair = head_tile // tiles_per_kv_head, head_tile % tiles_per_kv_head * BLOCK_M
    # What is likely is asked for with the lengths: a row's only token, and a split's only tile.
    is_head, head, _ = _name_pairs(pair + tl.arange(0, BLOCK_M), 1, kv_head, GROUP, True)
    queries = load_pieces(
        query + index.to(tl.int64) * query_token_stride + head * query_head_stride,
        is_head & (index < num_tokens), 0, MAIN, TAIL, HEAD_SIZE,
    )  # fmt: skip
    table = block_offsets + index.to(tl.int64) * table_stride
    most = table_stride * BLOCK_TOKENS - 1
    units = load_units(table, split * BLOCK_N, most, BLOCK_N, BLOCK_TOKENS)
    row, token, query_len, seq_len = _read_row(index, rows, cu_query_lens, seq_lens)
    if IS_DECODE & (query_len != 1) | (pair >= query_len * GROUP):
        return
    num_computed = seq_len - query_len
    earliest = num_computed + pair // GROUP
    last = num_computed + tl.minimum((pair + BLOCK_M - 1) // GROUP, query_len - 1)
    pair += tl.arange(0, BLOCK_M)
    is_head, head, in_row = _name_pairs(pair, query_len, kv_head, GROUP, IS_DECODE)
    token64 = (token + in_row).to(tl.int64)
    out_rows = out + token64 * out_token_stride + head * out_head_stride
    sums = zero_pieces(BLOCK_M, VALUE_MAIN, VALUE_TAIL)
    if seq_len == 0:  # a padding row of a captured batch
        if split == 0:
            nothing = tl.zeros((BLOCK_M,), tl.float32)
            store_pieces(out_rows, sums, nothing, is_head, part * VALUE_MAIN, HEAD_SIZE)
        return

    first = first_visible(earliest, window, chunk_tokens)
    num_sink_tiles, first_tile, num_tiles = count_tiles(first, last, sink_tokens, BLOCK_N)
    begin, end, num_used = take_tiles(split, num_tiles, num_splits, even_splits, LONG_TILES)
    if begin >= num_tiles:
        return

    if (not IS_DECODE) | (token != index):
        query_rows = query + token64 * query_token_stride + head * query_head_stride
        queries = load_pieces(query_rows, is_head, 0, MAIN, TAIL, HEAD_SIZE)
    biggest = tl.full((BLOCK_M,), NOTHING, tl.float32)
    if HAS_SINKS:  # split 0's
        sink = load_sinks(sinks + head, is_head & (split == 0))
        biggest = tl.maximum(biggest, sink)
    shares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)

    num_cached = num_computed if HAS_FRESH else seq_len
    first_key = tile_start(begin, num_sink_tiles, first_tile, BLOCK_N)
    table = block_offsets + row.to(tl.int64) * table_stride
    if (not IS_DECODE) | (first_key != split * BLOCK_N):
        units = load_units(table, first_key, last, BLOCK_N, BLOCK_TOKENS)
    key_head, value_head = key_cache + kv_head * head_stride, value_cache + kv_head * head_stride
    fresh_head = kv_head * fresh_head_stride
    in_block = tl.arange(0, BLOCK_N) % BLOCK_TOKENS * token_stride
    for tile in tl.range(begin, end, num_stages=NUM_STAGES):
        position = tile_start(tile, num_sink_tiles, first_tile, BLOCK_N) + tl.arange(0, BLOCK_N)
        is_read = (position <= last) & ((position >= first) | (position < sink_tokens))
        if BLOCK_N % BLOCK_TOKENS != 0:
            in_block = position % BLOCK_TOKENS * token_stride
        cached = in_block + units.to(tl.int64) * unit_stride
        fresh = (token + position - num_cached).to(tl.int64) * fresh_token_stride + fresh_head
        is_cached = position < num_cached
        key_rows = point_rows(key_head, fresh_key, cached, fresh, is_cached, True, HAS_FRESH)
        value_rows = point_rows(value_head, fresh_value, cached, fresh, is_cached, True, HAS_FRESH)
        next_key = tile_start(tile + 1, num_sink_tiles, first_tile, BLOCK_N)
        units = load_units(table, next_key, last, BLOCK_N, BLOCK_TOKENS)
        is_seen = is_read[None, :]
        if not IS_DECODE:
            is_seen = sees(num_computed + in_row, position, window, sink_tokens, chunk_tokens)
        biggest, shares, sums = attend_tile(
            queries, key_rows, value_rows, is_read, is_seen, biggest, shares, sums,
            part * VALUE_MAIN, scale, soft_cap, BLOCK_M, BLOCK_N, MAIN, TAIL, VALUE_MAIN,
            VALUE_TAIL, HEAD_SIZE, HAS_SOFT_CAP, HAS_ONE_FIELD and PARTS == 1, PRECISION,
        )  # fmt: skip

    total = tl.sum(shares, 1)
    if HAS_SINKS:
        total += tl.exp2(sink - biggest)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    if num_used > 1:
        group = index * tl.num_programs(0) + tl.program_id(0)
        own, own_tops = find_group(partial, tops, group, num_splits, BLOCK_M, SIZE)
        means, top = scale_pieces(sums, share), biggest + tl.log2(total)
        store_split(own, own_tops, split, means, top, BLOCK_M, SIZE)
        if not is_last_split(arrivals + group, num_used):
            return
        sums, total = fold_splits(own, own_tops, num_used, BLOCK_M, VALUE_MAIN, VALUE_TAIL)
        share = 1.0 / total
    store_pieces(out_rows, sums, share, is_head, part * VALUE_MAIN, HEAD_SIZE)


def decode_attention(
    args: AttentionArgs,
    num_rows: int,
    max_seq_len: int,
    tile: Tile | None = None,
    splits: Splits | None = None,
) -> None:
    """Attend for those of the first `num_rows` rows that have exactly one new token.

    Args:
        args: the op's arguments.
        max_seq_len: no row is longer; more splits than it can use are not launched.
        tile: sizes to take instead of the table's, for benchmarks.
        splits: programs a row to take instead of those that suit the batch, for benchmarks.
    """
    tile = tile or fit_decode_tile(
        args.group,
        args.query.shape[2],
        args.query.element_size(),
        args.has_one_field,
        num_rows * args.num_kv_heads,
        args.query.device,
    )
    _launch(args, None, num_rows, 1, max_seq_len, tile, splits)


def chunk_attention(
    args: AttentionArgs, rows: Tensor, max_query_len: int, max_seq_len: int
) -> None:
    """Attend for rows with few new tokens.

    Args:
        args: the op's arguments.
        rows: int32, indices of the rows.
        max_query_len: none of them has more new tokens.
        max_seq_len: none of them is longer.
    """
    head_size, itemsize = args.query.shape[2], args.query.element_size()
    tile = fit_chunk_tile(head_size, itemsize)
    _launch(args, rows, rows.shape[0], max_query_len, max_seq_len, tile, None)


def _launch(
    args: AttentionArgs,
    rows: Tensor | None,
    num_rows: int,
    max_query_len: int,
    max_seq_len: int,
    tile: Tile,
    splits: Splits | None,
) -> None:
    head_size, device = args.query.shape[2], args.query.device
    tile = cut_tile(tile, head_size, args.query.element_size(), args.has_one_field, device)
    main, tail = split_head(head_size)
    parts, is_overlapping = tile.value_parts, overlaps(device)
    value_main, value_tail = (main, tail) if parts == 1 else (VALUE_PART, 0)
    value_elements = value_main + value_tail
    tiles_per_kv_head = cdiv(max_query_len * args.group, tile.block_m)
    head_tiles = args.num_kv_heads * tiles_per_kv_head * parts
    num_groups = num_rows * head_tiles
    splits = splits or _choose_splits(args, num_groups, max_seq_len, tile, value_elements)
    num_sums = num_groups * splits.launched * tile.block_m if splits.launched > 1 else 0
    scratch = args.query.new_empty(num_sums * (value_elements + 1), dtype=torch.float32)
    pointers, strides = args.launch_arguments()
    _decode_kernel[(head_tiles, num_rows, splits.launched)](
        *pointers,
        rows,
        scratch,
        scratch[num_sums * value_elements :],
        get_counters(device),
        args.scale,
        args.soft_cap,
        args.mask()[0],
        args.sink_tokens or None,
        args.chunk_tokens or None,
        splits.launched,
        splits.even,
        tiles_per_kv_head,
        strides[0],
        args.query.shape[0],
        *strides[1:],
        GROUP=args.group,
        HEAD_SIZE=head_size,
        MAIN=main,
        TAIL=tail,
        PARTS=parts,
        VALUE_MAIN=value_main,
        VALUE_TAIL=value_tail,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_TOKENS=args.block_tokens,
        HAS_FRESH=args.fresh_key is not None,
        HAS_SOFT_CAP=args.soft_cap > 0,
        HAS_SINKS=args.sinks is not None,
        HAS_ONE_FIELD=args.has_one_field,
        PRECISION=args.precision,
        NUM_STAGES=tile.num_stages,
        LONG_TILES=LONG_SPLIT // tile.block_n,
        OVERLAPS=is_overlapping,
        launch_pdl=is_overlapping,
        num_warps=tile.num_warps,
    )


def _choose_splits(
    args: AttentionArgs, num_groups: int, max_seq_len: int, tile: Tile, value_elements: int
) -> Splits:
    if num_groups > NUM_COUNTERS:
        return Splits(launched=1, even=1)
    processors = count_processors(args.query.device)
    longest = args.longest_view(max_seq_len)
    return count_splits(num_groups, longest, tile, value_elements, processors)
