"""Attention of rows with few new tokens: split over the keys, folded by the last split to end.

Called by `attention.py`, for decode rows and for short ends of long prompts. A program serves one
(row, KV head, split) with all query heads of that KV head, of as many tokens as its tile holds, so
that a K or V row is read once (Dao et al., "Flash-Decoding for long-context inference", 2023). The
number of splits comes from shapes alone, the work of each from the row's length on the device: a
launch captured for the longest rows serves short ones, whose needless splits end at once, and a row
much longer than the others of its batch takes the splits that those do without.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.attention_args import AttentionArgs
from vllm._custom_ops.triton.attention_shape import (
    FEW_GROUPS,
    LONG_SPLIT,
    Splits,
    Tile,
    count_splits,
    fit_chunk_tile,
    fit_decode_tile,
    split_head,
)
from vllm._custom_ops.triton.attention_splits import fold_splits, store_split, take_tiles
from vllm._custom_ops.triton.attention_tile import (
    count_tiles,
    first_visible,
    load_part,
    locate_rows,
    point_rows,
    scale_logits,
    sees,
    step_softmax,
    store_head,
    store_zeros,
    tile_positions,
)
from vllm._custom_ops.triton.device import count_processors
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm.errors import KernelError
from vllm.utils.math import cdiv

_MAX_ARRIVALS = 1 << 16


@triton.jit
def _read_row(index, rows, cu_query_lens, seq_lens):
    """Return (row, its first new token, new tokens, length), loaded at once."""
    row = index if rows is None else tl.load(rows + index)
    token = tl.load(cu_query_lens + row)
    next_token = tl.load(cu_query_lens + row + 1)
    return row, token, next_token - token, tl.load(seq_lens + row)


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
    stats,
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
    """One (split, KV head with BLOCK_M pairs of new token and query head, row)."""
    IS_DECODE: tl.constexpr = rows is None
    split, head_tile, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    row, token, query_len, seq_len = _read_row(index, rows, cu_query_lens, seq_lens)
    kv_head, pair = head_tile // tiles_per_kv_head, head_tile % tiles_per_kv_head * BLOCK_M
    if IS_DECODE & (query_len != 1) | (pair >= query_len * GROUP):
        return
    num_computed = seq_len - query_len
    earliest = num_computed + pair // GROUP
    last = num_computed + tl.minimum((pair + BLOCK_M - 1) // GROUP, query_len - 1)
    pair += tl.arange(0, BLOCK_M)
    is_head, head, in_row = _name_pairs(pair, query_len, kv_head, GROUP, IS_DECODE)
    token64 = (token + in_row).to(tl.int64)
    out_rows = out + token64 * out_token_stride + head * out_head_stride
    if seq_len == 0:  # a padding row of a captured batch
        if split == 0:
            store_zeros(out_rows, is_head, BLOCK_M, MAIN, TAIL, HEAD_SIZE)
        return

    first = first_visible(earliest, window, chunk_tokens)
    num_sink_tiles, first_tile, num_tiles = count_tiles(first, last, sink_tokens, BLOCK_N)
    begin, end, num_used = take_tiles(split, num_tiles, num_splits, even_splits, LONG_TILES)
    if split >= num_used:
        return

    query_rows = query + token64 * query_token_stride + head * query_head_stride
    query_main = load_part(query_rows, is_head, 0, MAIN, HEAD_SIZE)
    biggest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:  # split 0's
        sink = tl.load(sinks + head, mask=is_head & (split == 0), other=float("-inf"))
        biggest = sink * 1.4426950408889634
        total += tl.where(split == 0, 1.0, 0.0)
    main, tail = tl.zeros((BLOCK_M, MAIN), tl.float32), 0.0
    if TAIL:
        query_tail = load_part(query_rows, is_head, MAIN, TAIL, HEAD_SIZE)
        tail = tl.zeros((BLOCK_M, TAIL), tl.float32)

    num_cached = num_computed if HAS_FRESH else seq_len
    table = block_offsets + row.to(tl.int64) * table_stride
    key_head, value_head = key_cache + kv_head * head_stride, value_cache + kv_head * head_stride
    fresh_key_head = fresh_key + kv_head * fresh_head_stride
    fresh_value_head = fresh_value + kv_head * fresh_head_stride
    for tile in tl.range(begin, end, num_stages=NUM_STAGES):
        position = tile_positions(tile, num_sink_tiles, first_tile, BLOCK_N)
        is_read = (position <= last) & ((position >= first) | (position < sink_tokens))
        cached_place, fresh_place = locate_rows(
            table, position, is_read, num_cached, token,
            unit_stride, token_stride, fresh_token_stride, BLOCK_TOKENS, True,
        )  # fmt: skip
        is_cached = position < num_cached
        key_rows = point_rows(
            key_head, fresh_key_head, cached_place, fresh_place, is_cached, True, HAS_FRESH
        )
        key_main = load_part(key_rows, is_read, 0, MAIN, HEAD_SIZE)
        products = tl.dot(query_main, tl.trans(key_main), input_precision=PRECISION)
        if TAIL:
            key_tail = load_part(key_rows, is_read, MAIN, TAIL, HEAD_SIZE)
            products = tl.dot(query_tail, tl.trans(key_tail), products, input_precision=PRECISION)
        logits = scale_logits(products, scale, soft_cap, HAS_SOFT_CAP)
        is_seen = is_read[None, :]
        if not IS_DECODE:
            is_seen = sees(num_computed + in_row, position, window, sink_tokens, chunk_tokens)
        logits = tl.where(is_seen, logits, float("-inf"))
        weights, factor, biggest, total = step_softmax(logits, biggest, total)
        value_main = key_main
        if not HAS_ONE_FIELD:
            value_rows = point_rows(
                value_head, fresh_value_head, cached_place, fresh_place, is_cached, True, HAS_FRESH
            )
            value_main = load_part(value_rows, is_read, 0, MAIN, HEAD_SIZE)
        weights = weights.to(value_main.dtype)
        main = tl.dot(weights, value_main, main * factor[:, None], input_precision=PRECISION)
        if TAIL:
            value_tail = key_tail
            if not HAS_ONE_FIELD:
                value_tail = load_part(value_rows, is_read, MAIN, TAIL, HEAD_SIZE)
            tail = tl.dot(weights, value_tail, tail * factor[:, None], input_precision=PRECISION)

    if num_used == 1:
        store_head(out_rows, main, tail, total, is_head, MAIN, TAIL, HEAD_SIZE)
        return
    # Partial sums stand as [row, split, tile of pairs]: a fold reads whole tiles.
    num_pairs = tl.num_programs(1) * BLOCK_M
    first_place = index.to(tl.int64) * num_splits * num_pairs + head_tile * BLOCK_M
    place = first_place + split * num_pairs + tl.arange(0, BLOCK_M)
    store_split(
        partial, stats, place, main, tail, biggest, total, is_head, MAIN, TAIL, HEAD_SIZE
    )  # fmt: skip
    tl.debug_barrier()  # every thread has stored before one of them says so
    arrival = arrivals + index * tl.num_programs(1) + head_tile
    if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") != num_used - 1:
        return
    tl.debug_barrier()
    tl.store(arrival, 0)  # as the next launch expects it
    main, tail, total = fold_splits(
        partial + first_place * HEAD_SIZE, stats + first_place * 2, num_used, num_pairs, is_head,
        BLOCK_M, MAIN, TAIL, HEAD_SIZE, BLOCK_N > 32,
    )  # fmt: skip
    store_head(out_rows, main, tail, total, is_head, MAIN, TAIL, HEAD_SIZE)


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
    has_few_groups = num_rows * args.num_kv_heads <= FEW_GROUPS
    tile = tile or fit_decode_tile(
        args.group,
        args.query.shape[2],
        args.query.element_size(),
        args.has_one_field,
        args.query.device,
        has_few_groups,
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
    main, tail = split_head(head_size)
    tiles_per_kv_head = cdiv(max_query_len * args.group, tile.block_m)
    head_tiles = args.num_kv_heads * tiles_per_kv_head
    num_groups = num_rows * head_tiles
    splits = splits or count_splits(
        num_groups, args.longest_view(max_seq_len), tile.block_n, count_processors(device)
    )
    if num_groups > _MAX_ARRIVALS:
        splits = Splits(launched=1, even=1)
    num_sums = num_groups * splits.launched * tile.block_m if splits.launched > 1 else 0
    is_overlapping = overlaps(device)
    scratch = args.query.new_empty(num_sums * (head_size + 2), dtype=torch.float32)
    pointers, strides = args.launch_arguments()
    _decode_kernel[(splits.launched, head_tiles, num_rows)](
        *pointers,
        rows,
        scratch,
        scratch[num_sums * head_size :],
        arrival_counters(device),
        args.scale,
        args.soft_cap,
        *args.mask(),
        splits.launched,
        splits.even,
        tiles_per_kv_head,
        *strides,
        GROUP=args.group,
        HEAD_SIZE=head_size,
        MAIN=main,
        TAIL=tail,
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


@functools.cache
def arrival_counters(device: torch.device) -> Tensor:
    """Return the counters of a device, int32 zeros between launches on its one stream.

    Raises:
        KernelError: first asked for while a graph is captured, which would record their zeroing.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise KernelError(
            "attention cannot run for the first time while a CUDA graph is captured; run the step "
            "once before the capture"
        )
    return torch.zeros(_MAX_ARRIVALS, dtype=torch.int32, device=device)
