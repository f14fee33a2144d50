"""Attention of rows with many new tokens: tiles of queries over cached keys, then the new ones.

Called by `attention.py`. A program serves one (query tile, head, row) with an online softmax over
tiles of keys (Dao, "FlashAttention-2", 2023). Whether a key is cached or new is decided key by key,
so that prompts that are resumed anywhere meet the same tiles. Where a Hopper is faster by its own
means, `attention_hopper.py` serves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm._custom_ops.triton.attention_args import AttentionArgs
from vllm._custom_ops.triton.attention_hopper import MIN_TOKENS, can_attend, hopper_attention
from vllm._custom_ops.triton.attention_shape import Tile, cut_tile, fit_prefill_tile, split_head
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
)
from vllm._custom_ops.triton.launch import fast_launch
from vllm.utils.math import cdiv


@triton.jit
def _attend_tile(
    sums,
    query,
    begin,
    view,
    rows,
    strides,
    scaling,
    BLOCK_N: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    HAS_FRESH: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_ONE_FIELD: tl.constexpr,
    IS_CAUSAL_ONLY: tl.constexpr,
    IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Let a tile of queries see the keys from `begin` on; tails are unused where TAIL is 0.

    Args:
        sums: greatest logit, sum of weights, main and tail of what was read so far.
        query: main, tail and positions.
        view: first and last key that some query sees, window, sink tokens, chunk.
        rows: keys and values in the cache, new keys and values, block table, rows in the cache,
            place of the first new one.
        strides: of units, tokens in the cache, new keys and new values.
        scaling: factor of the logits, soft cap.
    """
    biggest, total, main, tail = sums
    query_main, query_tail, query_position = query
    first, last, window, sink_tokens, chunk_tokens = view
    key_head, value_head, fresh_key_head, fresh_value_head, table, num_cached, first_fresh = rows
    unit_stride, token_stride, fresh_token_stride, value_token_stride = strides
    scale, soft_cap = scaling
    position = begin + tl.arange(0, BLOCK_N)
    is_read = position <= last
    if not IS_CAUSAL_ONLY:
        is_read &= (position >= first) | (position < sink_tokens)
    if not IS_MASKED:
        is_read = position >= 0
    cached_place, fresh_row = locate_rows(
        table, position, is_read, num_cached, first_fresh,
        unit_stride, token_stride, 1, BLOCK_TOKENS, HAS_CACHE,
    )  # fmt: skip
    is_cached = position < num_cached
    key_rows = point_rows(
        key_head, fresh_key_head, cached_place, fresh_row * fresh_token_stride, is_cached,
        HAS_CACHE, HAS_FRESH,
    )  # fmt: skip
    key_main = load_part(key_rows, is_read, 0, MAIN, HEAD_SIZE, IS_MASKED)
    products = tl.dot(query_main, tl.trans(key_main), input_precision=PRECISION)
    if TAIL:
        key_tail = load_part(key_rows, is_read, MAIN, TAIL, HEAD_SIZE, IS_MASKED)
        products = tl.dot(query_tail, tl.trans(key_tail), products, input_precision=PRECISION)
    logits = scale_logits(products, scale, soft_cap, HAS_SOFT_CAP)
    if IS_MASKED:
        is_seen = position[None, :] <= query_position[:, None]
        if not IS_CAUSAL_ONLY:
            is_seen = sees(query_position, position, window, sink_tokens, chunk_tokens)
        logits = tl.where(is_seen, logits, float("-inf"))
    weights, factor, biggest, total = step_softmax(logits, biggest, total)
    if HAS_ONE_FIELD:
        value_main = key_main
    else:
        value_rows = point_rows(
            value_head, fresh_value_head, cached_place, fresh_row * value_token_stride, is_cached,
            HAS_CACHE, HAS_FRESH,
        )  # fmt: skip
        value_main = load_part(value_rows, is_read, 0, MAIN, VALUE_SIZE, IS_MASKED)
    weights = weights.to(value_main.dtype)
    main = tl.dot(weights, value_main, main * factor[:, None], input_precision=PRECISION)
    if TAIL and VALUE_SIZE > MAIN:
        if HAS_ONE_FIELD:
            value_tail = key_tail
        else:
            value_tail = load_part(value_rows, is_read, MAIN, TAIL, VALUE_SIZE, IS_MASKED)
        tail = tl.dot(weights, value_tail, tail * factor[:, None], input_precision=PRECISION)
    return biggest, total, main, tail


@triton.jit
def _masked_tile(tile, num_before, whole_end, num_sink_tiles, first_tile):
    """Return the index of the i-th tile that is not seen whole: sinks, left edge, right edge."""
    left = tl.where(tile < num_sink_tiles, tile, tile - num_sink_tiles + first_tile)
    return tl.where(tile < num_before, left, tile - num_before + whole_end)


@fast_launch
@triton.jit(
    do_not_specialize=[
        "window",
        "sink_tokens",
        "chunk_tokens",
        "first_row",
        "min_query_len",
        "table_stride",
    ]
)
def _prefill_kernel(
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
    cu_key_lens,
    scale,
    soft_cap,
    window,
    sink_tokens,
    chunk_tokens,
    first_row,
    min_query_len,
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
    value_token_stride,
    value_head_stride,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    HAS_FRESH: tl.constexpr,
    HAS_VALUE_STRIDES: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ONE_FIELD: tl.constexpr,
    IS_CAUSAL_ONLY: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One (head, query tile, row); the last tiles of a row, which see the most, come first."""
    head, row = tl.program_id(0), tl.program_id(2) + first_row
    token = tl.load(cu_query_lens + row)
    query_len = tl.load(cu_query_lens + row + 1) - token
    num_query_tiles = tl.cdiv(query_len, BLOCK_M)
    if (tl.program_id(1) >= num_query_tiles) | (query_len < min_query_len):
        return
    seq_len = tl.load(seq_lens + row)
    num_computed = seq_len - query_len
    if num_computed < 0:  # a padding row
        return
    start = (num_query_tiles - 1 - tl.program_id(1)) * BLOCK_M
    in_row = start + tl.arange(0, BLOCK_M)
    is_query = in_row < query_len
    query_position = num_computed + in_row
    query_token = (token + in_row).to(tl.int64)
    query_rows = query + query_token * query_token_stride + head * query_head_stride
    query_main = load_part(query_rows, is_query, 0, MAIN, HEAD_SIZE)
    query_tail, tail = query_main, 0.0
    VALUE_TAIL: tl.constexpr = TAIL if VALUE_SIZE > MAIN else 0
    if TAIL:
        query_tail = load_part(query_rows, is_query, MAIN, TAIL, HEAD_SIZE)
    if VALUE_TAIL:
        tail = tl.zeros((BLOCK_M, TAIL), tl.float32)
    main = tl.zeros((BLOCK_M, MAIN), tl.float32)
    biggest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        biggest = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks + head) * 1.4426950408889634
        total += 1.0
    sums = (biggest, total, main, tail)

    position = num_computed + start
    last = tl.minimum(position + BLOCK_M, seq_len) - 1
    first = first_visible(position, window, chunk_tokens)
    num_sink_tiles, first_tile, _ = count_tiles(first, last, sink_tokens, BLOCK_N)
    # Tiles whole_begin … whole_end - 1 are seen by every query from end to end: no mask.
    all_see = first_visible(last, window, chunk_tokens)
    whole_end = (position + 1) // BLOCK_N
    whole_begin = tl.minimum(tl.cdiv(all_see, BLOCK_N), whole_end)
    whole_begin = tl.maximum(whole_begin, first_tile)
    whole_end = tl.maximum(whole_begin, whole_end)
    if not HAS_VALUE_STRIDES:  # as those of keys, which then need no registers of their own
        value_token_stride, value_head_stride = fresh_token_stride, fresh_head_stride
    kv_head = head // GROUP
    key_head = key_cache + kv_head * head_stride
    value_head = value_cache + kv_head * head_stride
    fresh_key_head = fresh_key + kv_head * fresh_head_stride
    fresh_value_head = fresh_value + kv_head * value_head_stride
    table = block_offsets + row.to(tl.int64) * table_stride
    num_cached = num_computed if HAS_FRESH else seq_len
    first_fresh = tl.load(cu_key_lens + row + 1) - query_len
    query_parts = (query_main, query_tail, query_position)
    view = (first, last, window, sink_tokens, chunk_tokens)
    rows = (
        key_head, value_head, fresh_key_head, fresh_value_head, table, num_cached, first_fresh,
    )  # fmt: skip
    strides = (unit_stride, token_stride, fresh_token_stride, value_token_stride)
    for tile in tl.range(whole_begin, whole_end, num_stages=NUM_STAGES):
        sums = _attend_tile(
            sums, query_parts, tile * BLOCK_N, view, rows, strides, (scale, soft_cap),
            BLOCK_N, HEAD_SIZE, VALUE_SIZE, MAIN, TAIL, BLOCK_TOKENS, HAS_CACHE, HAS_FRESH,
            HAS_SOFT_CAP, HAS_ONE_FIELD, IS_CAUSAL_ONLY, False, PRECISION,
        )  # fmt: skip
    num_before = num_sink_tiles + whole_begin - first_tile
    num_masked = num_before + last // BLOCK_N + 1 - whole_end
    for tile in tl.range(0, num_masked, num_stages=NUM_STAGES):
        index = _masked_tile(tile, num_before, whole_end, num_sink_tiles, first_tile)
        sums = _attend_tile(
            sums, query_parts, index * BLOCK_N, view, rows, strides, (scale, soft_cap),
            BLOCK_N, HEAD_SIZE, VALUE_SIZE, MAIN, TAIL, BLOCK_TOKENS, HAS_CACHE, HAS_FRESH,
            HAS_SOFT_CAP, HAS_ONE_FIELD, IS_CAUSAL_ONLY, True, PRECISION,
        )  # fmt: skip
    _, total, main, tail = sums
    out_rows = out + query_token * out_token_stride + head * out_head_stride
    store_head(out_rows, main, tail, total, is_query, MAIN, VALUE_TAIL, VALUE_SIZE)


def prefill_attention(
    args: AttentionArgs,
    first_row: int,
    num_rows: int,
    max_query_len: int,
    min_query_len: int,
    tile: Tile | None = None,
) -> None:
    """Attend for rows `first_row` … that have at least `min_query_len` new tokens.

    Args:
        args: the op's arguments.
        num_rows: rows from `first_row` on.
        max_query_len: no row has more new tokens.
        tile: sizes to take instead of the table's, for benchmarks, and never Hopper's kernel.
    """
    if tile is None and args.key_cache is None and max_query_len >= MIN_TOKENS and can_attend(args):
        hopper_attention(args, first_row, num_rows, max_query_len, min_query_len)
        return
    assert args.prefix is None, "only Hopper's kernel reads cached rows apart from new ones"
    num_heads, head_size = args.query.shape[1:]
    main, tail = split_head(head_size)
    sizes = head_size, args.query.element_size(), args.has_one_field, args.query.device
    tile = cut_tile(tile or fit_prefill_tile(*sizes), *sizes)
    pointers, strides = args.launch_arguments(has_value_strides=True)
    window, sink_tokens, chunk_tokens = args.mask()
    grid = (num_heads, cdiv(max_query_len, tile.block_m), num_rows)
    _prefill_kernel[grid](
        *pointers,
        args.cu_query_lens if args.cu_key_lens is None else args.cu_key_lens,
        args.scale,
        args.soft_cap,
        window,
        sink_tokens,
        chunk_tokens,
        first_row,
        min_query_len,
        *strides,
        GROUP=args.group,
        HEAD_SIZE=head_size,
        VALUE_SIZE=args.out.shape[2],
        MAIN=main,
        TAIL=tail,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_TOKENS=args.block_tokens,
        HAS_CACHE=args.key_cache is not None,
        HAS_FRESH=args.fresh_key is not None,
        HAS_VALUE_STRIDES=strides[-4:-2] != strides[-2:],
        HAS_SOFT_CAP=args.soft_cap > 0,
        HAS_SINKS=args.sinks is not None,
        HAS_ONE_FIELD=args.has_one_field,
        IS_CAUSAL_ONLY=not (args.window or args.chunk_tokens),
        PRECISION=args.precision,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
