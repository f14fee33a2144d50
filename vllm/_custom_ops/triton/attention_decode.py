"""Attention of rows with one new token: split over the keys, folded by the last split to end.

Called by `attention.py`. A program serves one (row, KV head, split) with all query heads of that KV
head, so that a K or V row is read once (Dao et al., "Flash-Decoding for long-context inference",
2023). The number of splits comes from shapes alone, the work of each from the row's length on the
device: a launch captured for the longest rows serves short ones, whose needless splits end at once,
and a row much longer than the others of its batch takes the splits that those do without.
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
    MAX_SPLITS,
    Splits,
    Tile,
    count_processors,
    count_splits,
    fit_decode_tile,
    split_head,
)
from vllm._custom_ops.triton.attention_tile import (
    count_tiles,
    first_visible,
    load_part,
    locate_rows,
    point_rows,
    scale_logits,
    step_softmax,
    store_head,
    store_part,
    store_zeros,
    tile_positions,
)
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm.errors import KernelError

_MAX_ARRIVALS = 1 << 16
_MAX_SPLITS = tl.constexpr(MAX_SPLITS)


@triton.jit
def _fold_splits(
    partial,
    stats,
    num_used,
    split_stride,
    is_head,
    BLOCK_M: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Fold the splits of one program group in their order; (main, tail, total).

    Their weights come first, from one round of loads; then none of the sums waits for another.
    """
    UNROLL: tl.constexpr = 8 if BLOCK_M * MAIN <= 2048 else 4  # as many as the registers hold
    main = tl.zeros((BLOCK_M, MAIN), tl.float32)
    tail = tl.zeros((BLOCK_M, TAIL if TAIL else 1), tl.float32)
    head = tl.arange(0, BLOCK_M)
    every = tl.arange(0, _MAX_SPLITS)
    rows = stats + (every[None, :] * split_stride + head[:, None]) * 2
    is_given = is_head[:, None] & (every < num_used)[None, :]
    tops = tl.load(rows, mask=is_given, other=float("-inf"))
    biggest = tl.max(tops, 1)
    biggest = tl.where(biggest == float("-inf"), 0.0, biggest)
    shares = tl.load(rows + 1, mask=is_given, other=0.0)
    total = tl.sum(shares * tl.exp2(tops - biggest[:, None]), 1)
    for begin in range(0, num_used, UNROLL):
        for i in tl.static_range(UNROLL):  # loads of several splits are under way at once
            split = begin + i
            is_in = is_head & (split < num_used)
            place = split * split_stride + head
            top = tl.load(stats + place * 2, mask=is_in, other=float("-inf"))
            weight = tl.exp2(top - biggest)[:, None]
            sums = partial + place * HEAD_SIZE
            main += weight * load_part(sums, is_in, 0, MAIN, HEAD_SIZE)
            if TAIL:
                tail += weight * load_part(sums, is_in, MAIN, TAIL, HEAD_SIZE)
    return main, tail, total


@triton.jit
def _take_tiles(split, num_tiles, num_splits, even_splits, long_tiles):
    """Return (first tile of a split, end, splits in use).

    Only a row whose parts would else be long takes more than `even_splits`.
    """
    even_tiles = tl.minimum(tl.cdiv(num_tiles, even_splits), long_tiles)
    size = tl.maximum(tl.cdiv(num_tiles, num_splits), even_tiles)
    begin = split * size
    return begin, tl.minimum(begin + size, num_tiles), tl.cdiv(num_tiles, size)


@triton.jit
def _store_split(
    partial,
    stats,
    place,
    main,
    tail,
    biggest,
    total,
    is_head,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Store the sums, the greatest logits and the sums of weights of one split."""
    store_part(partial + place * HEAD_SIZE, main, is_head, 0, MAIN, HEAD_SIZE)
    if TAIL:
        store_part(partial + place * HEAD_SIZE, tail, is_head, MAIN, TAIL, HEAD_SIZE)
    tl.store(stats + place * 2, biggest, mask=is_head)
    tl.store(stats + place * 2 + 1, total, mask=is_head)


_VARYING = ["window", "sink_tokens", "chunk_tokens", "num_splits", "even_splits", "table_stride"]


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
    LONG_SPLIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One (split, KV head with BLOCK_M of its query heads, row)."""
    let_next_start(OVERLAPS)
    split, head_tile, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    await_inputs(OVERLAPS)
    token = tl.load(cu_query_lens + row)
    next_token = tl.load(cu_query_lens + row + 1)
    seq_len = tl.load(seq_lens + row)  # all three at once
    if next_token - token != 1:
        return
    tiles_per_kv_head: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = head_tile // tiles_per_kv_head
    in_group = head_tile % tiles_per_kv_head * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head, head = in_group < GROUP, kv_head * GROUP + in_group
    token64 = token.to(tl.int64)
    out_rows = out + token64 * out_token_stride + head * out_head_stride
    if seq_len == 0:  # a padding row of a captured batch
        if split == 0:
            store_zeros(out_rows, is_head, BLOCK_M, MAIN, TAIL, HEAD_SIZE)
        return

    first = first_visible(seq_len - 1, window, chunk_tokens)
    num_sink_tiles, first_tile, num_tiles = count_tiles(first, seq_len - 1, sink_tokens, BLOCK_N)
    begin, end, num_used = _take_tiles(
        split, num_tiles, num_splits, even_splits, LONG_SPLIT // BLOCK_N
    )
    if split >= num_used:
        return

    query_rows = query + token64 * query_token_stride + head * query_head_stride
    query_main = load_part(query_rows, is_head, 0, MAIN, HEAD_SIZE)
    biggest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_head, other=0.0) * 1.4426950408889634
        biggest = tl.where(split == 0, sink, biggest)
        total += tl.where(split == 0, 1.0, 0.0)
    main, tail = tl.zeros((BLOCK_M, MAIN), tl.float32), 0.0
    if TAIL:
        query_tail = load_part(query_rows, is_head, MAIN, TAIL, HEAD_SIZE)
        tail = tl.zeros((BLOCK_M, TAIL), tl.float32)

    num_cached = seq_len - 1 if HAS_FRESH else seq_len
    table = block_offsets + row.to(tl.int64) * table_stride
    key_head = key_cache + kv_head * head_stride
    value_head = value_cache + kv_head * head_stride
    fresh_key_head = fresh_key + kv_head * fresh_head_stride
    fresh_value_head = fresh_value + kv_head * fresh_head_stride
    for tile in tl.range(begin, end, num_stages=NUM_STAGES):
        position = tile_positions(tile, num_sink_tiles, first_tile, BLOCK_N)
        is_seen = (position < seq_len) & ((position >= first) | (position < sink_tokens))
        cached_place, fresh_place = locate_rows(
            table, position, is_seen, num_cached, token,
            unit_stride, token_stride, fresh_token_stride, BLOCK_TOKENS, True,
        )  # fmt: skip
        is_cached = position < num_cached
        key_rows = point_rows(
            key_head, fresh_key_head, cached_place, fresh_place, is_cached, True, HAS_FRESH
        )
        key_main = load_part(key_rows, is_seen, 0, MAIN, HEAD_SIZE)
        products = tl.dot(query_main, tl.trans(key_main), input_precision=PRECISION)
        if TAIL:
            key_tail = load_part(key_rows, is_seen, MAIN, TAIL, HEAD_SIZE)
            products = tl.dot(query_tail, tl.trans(key_tail), products, input_precision=PRECISION)
        logits = scale_logits(products, scale, soft_cap, HAS_SOFT_CAP)
        logits = tl.where(is_seen[None, :], logits, float("-inf"))
        weights, factor, biggest, total = step_softmax(logits, 1.0, biggest, total)
        if HAS_ONE_FIELD:
            value_main = key_main
        else:
            value_rows = point_rows(
                value_head, fresh_value_head, cached_place, fresh_place, is_cached, True, HAS_FRESH
            )
            value_main = load_part(value_rows, is_seen, 0, MAIN, HEAD_SIZE)
        weights = weights.to(value_main.dtype)
        main = tl.dot(weights, value_main, main * factor[:, None], input_precision=PRECISION)
        if TAIL:
            if HAS_ONE_FIELD:
                value_tail = key_tail
            else:
                value_tail = load_part(value_rows, is_seen, MAIN, TAIL, HEAD_SIZE)
            tail = tl.dot(weights, value_tail, tail * factor[:, None], input_precision=PRECISION)

    if num_used == 1:
        store_head(out_rows, main, tail, total, is_head, MAIN, TAIL, HEAD_SIZE)
        return
    # Partial sums stand as [row, split, head]: a fold reads whole rows of a few heads.
    num_heads = tl.num_programs(1) // tiles_per_kv_head * GROUP
    first_place = row.to(tl.int64) * num_splits * num_heads + kv_head * GROUP
    first_place += head_tile % tiles_per_kv_head * BLOCK_M
    place = first_place + split * num_heads + tl.arange(0, BLOCK_M)
    _store_split(
        partial, stats, place, main, tail, biggest, total, is_head, MAIN, TAIL, HEAD_SIZE
    )  # fmt: skip
    tl.debug_barrier()  # every thread has stored before one of them says so
    arrival = arrivals + row * tl.num_programs(1) + head_tile
    if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") != num_used - 1:
        return
    tl.debug_barrier()
    tl.store(arrival, 0)  # as the next launch expects it
    main, tail, total = _fold_splits(
        partial + first_place * HEAD_SIZE, stats + first_place * 2, num_used, num_heads, is_head,
        BLOCK_M, MAIN, TAIL, HEAD_SIZE,
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
    cache = args.key_cache
    assert cache is not None
    num_heads, head_size = args.query.shape[1:]
    group = num_heads // args.num_kv_heads
    main, tail = split_head(head_size)
    has_few_groups = num_rows * args.num_kv_heads <= FEW_GROUPS
    itemsize = args.query.element_size()
    tile = tile or fit_decode_tile(
        group, head_size, itemsize, args.has_one_field, cache.device, has_few_groups
    )
    head_tiles = args.num_kv_heads * -(-group // tile.block_m)
    num_groups = num_rows * head_tiles
    splits = splits or count_splits(
        num_groups, args.longest_view(max_seq_len), tile.block_n, count_processors(cache.device)
    )
    if num_groups > _MAX_ARRIVALS:
        splits = Splits(launched=1, even=1)
    num_sums = num_rows * splits.launched * num_heads if splits.launched > 1 else 0
    is_overlapping = overlaps(cache.device)
    scratch = args.query.new_empty(num_sums * (head_size + 2), dtype=torch.float32)
    pointers, strides = args.launch_arguments()
    _decode_kernel[(splits.launched, head_tiles, num_rows)](
        *pointers,
        scratch,
        scratch[num_sums * head_size :],
        arrival_counters(cache.device),
        args.scale,
        args.soft_cap,
        *args.mask(),
        splits.launched,
        splits.even,
        *strides,
        GROUP=group,
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
        LONG_SPLIT=LONG_SPLIT,
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
