"""Attention of rows with many new tokens: tiles of queries over cached keys, then the new ones.

Called by `attention.py`. A program serves one (query tile, head, row) with an online softmax over
tiles of keys (Dao, "FlashAttention-2", 2023). Whether a key is cached or new is decided key by key,
so that prompts that are resumed anywhere meet the same tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm._custom_ops.triton.attention_args import AttentionArgs
from vllm._custom_ops.triton.attention_shape import Tile, fit_prefill_tile, split_head
from vllm._custom_ops.triton.attention_tile import (
    count_tiles,
    first_visible,
    load_part,
    locate_rows,
    point_rows,
    scale_logits,
    step_softmax,
    store_head,
    tile_positions,
)
from vllm._custom_ops.triton.launch import fast_launch


@triton.jit
def _attend_tile(
    biggest,
    total,
    main,
    tail,
    query_main,
    query_tail,
    query_position,
    position,
    first,
    last,
    key_head,
    value_head,
    fresh_key_head,
    fresh_value_head,
    table,
    num_cached,
    first_fresh,
    scale,
    soft_cap,
    window,
    sink_tokens,
    chunk_tokens,
    unit_stride,
    token_stride,
    fresh_token_stride,
    HEAD_SIZE: tl.constexpr,
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
    """Let a tile of queries see one tile of keys; `tail` is unused where TAIL is 0."""
    is_read = position <= last
    if not IS_CAUSAL_ONLY:
        is_read &= (position >= first) | (position < sink_tokens)
    if not IS_MASKED:
        is_read = position >= 0
    cached_place, fresh_place = locate_rows(
        table, position, is_read, num_cached, first_fresh,
        unit_stride, token_stride, fresh_token_stride, BLOCK_TOKENS, HAS_CACHE,
    )  # fmt: skip
    is_cached = position < num_cached
    key_rows = point_rows(
        key_head, fresh_key_head, cached_place, fresh_place, is_cached, HAS_CACHE, HAS_FRESH
    )
    key_main = load_part(key_rows, is_read, 0, MAIN, HEAD_SIZE)
    products = tl.dot(query_main, tl.trans(key_main), input_precision=PRECISION)
    if TAIL:
        key_tail = load_part(key_rows, is_read, MAIN, TAIL, HEAD_SIZE)
        products = tl.dot(query_tail, tl.trans(key_tail), products, input_precision=PRECISION)
    logits = scale_logits(products, scale, soft_cap, HAS_SOFT_CAP)
    if IS_MASKED:
        is_seen = position[None, :] <= query_position[:, None]
        if not IS_CAUSAL_ONLY:
            from_here = first_visible(query_position, window, chunk_tokens)
            is_near = position[None, :] >= from_here[:, None]
            is_seen &= is_near | (position < sink_tokens)[None, :]
        logits = tl.where(is_seen, logits, float("-inf"))
    weights, factor, biggest, total = step_softmax(logits, biggest, total)
    if HAS_ONE_FIELD:
        value_main = key_main
    else:
        value_rows = point_rows(
            value_head, fresh_value_head, cached_place, fresh_place, is_cached, HAS_CACHE, HAS_FRESH
        )
        value_main = load_part(value_rows, is_read, 0, MAIN, HEAD_SIZE)
    weights = weights.to(value_main.dtype)
    main = tl.dot(weights, value_main, main * factor[:, None], input_precision=PRECISION)
    if TAIL:
        if HAS_ONE_FIELD:
            value_tail = key_tail
        else:
            value_tail = load_part(value_rows, is_read, MAIN, TAIL, HEAD_SIZE)
        tail = tl.dot(weights, value_tail, tail * factor[:, None], input_precision=PRECISION)
    return biggest, total, main, tail


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
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    HAS_FRESH: tl.constexpr,
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
    if TAIL:
        query_tail = load_part(query_rows, is_query, MAIN, TAIL, HEAD_SIZE)
        tail = tl.zeros((BLOCK_M, TAIL), tl.float32)
    main = tl.zeros((BLOCK_M, MAIN), tl.float32)
    biggest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:
        biggest = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks + head) * 1.4426950408889634
        total += 1.0

    last = tl.minimum(num_computed + start + BLOCK_M, seq_len) - 1
    first = first_visible(num_computed + start, window, chunk_tokens)
    num_sink_tiles, first_tile, num_tiles = count_tiles(first, last, sink_tokens, BLOCK_N)
    kv_head = head // GROUP
    key_head = key_cache + kv_head * head_stride
    value_head = value_cache + kv_head * head_stride
    fresh_key_head = fresh_key + kv_head * fresh_head_stride
    fresh_value_head = fresh_value + kv_head * fresh_head_stride
    table = block_offsets + row.to(tl.int64) * table_stride
    num_cached = num_computed if HAS_FRESH else seq_len
    num_whole_tiles = 0
    if IS_CAUSAL_ONLY:  # every query sees every key of these
        num_whole_tiles = (num_computed + start + 1) // BLOCK_N
        for tile in tl.range(0, num_whole_tiles, num_stages=NUM_STAGES):
            biggest, total, main, tail = _attend_tile(
                biggest, total, main, tail, query_main, query_tail, query_position,
                tile_positions(tile, 0, 0, BLOCK_N), first, last,
                key_head, value_head, fresh_key_head, fresh_value_head, table, num_cached, token,
                scale, soft_cap, window, sink_tokens, chunk_tokens,
                unit_stride, token_stride, fresh_token_stride,
                HEAD_SIZE, MAIN, TAIL, BLOCK_TOKENS, HAS_CACHE, HAS_FRESH, HAS_SOFT_CAP,
                HAS_ONE_FIELD, IS_CAUSAL_ONLY, False, PRECISION,
            )  # fmt: skip
    for tile in tl.range(num_whole_tiles, num_tiles, num_stages=NUM_STAGES):
        biggest, total, main, tail = _attend_tile(
            biggest, total, main, tail, query_main, query_tail, query_position,
            tile_positions(tile, num_sink_tiles, first_tile, BLOCK_N), first, last,
            key_head, value_head, fresh_key_head, fresh_value_head, table, num_cached, token,
            scale, soft_cap, window, sink_tokens, chunk_tokens,
            unit_stride, token_stride, fresh_token_stride,
            HEAD_SIZE, MAIN, TAIL, BLOCK_TOKENS, HAS_CACHE, HAS_FRESH, HAS_SOFT_CAP,
            HAS_ONE_FIELD, IS_CAUSAL_ONLY, True, PRECISION,
        )  # fmt: skip

    out_rows = out + query_token * out_token_stride + head * out_head_stride
    store_head(out_rows, main, tail, total, is_query, MAIN, TAIL, HEAD_SIZE)


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
        tile: sizes to take instead of the table's, for benchmarks.
    """
    num_heads, head_size = args.query.shape[1:]
    main, tail = split_head(head_size)
    tile = tile or fit_prefill_tile(
        head_size, args.query.element_size(), args.has_one_field, args.query.device
    )
    pointers, strides = args.launch_arguments()
    window, sink_tokens, chunk_tokens = args.mask()
    grid = (num_heads, -(-max_query_len // tile.block_m), num_rows)
    _prefill_kernel[grid](
        *pointers,
        args.scale,
        args.soft_cap,
        window,
        sink_tokens,
        chunk_tokens,
        first_row,
        min_query_len,
        *strides,
        GROUP=num_heads // args.num_kv_heads,
        HEAD_SIZE=head_size,
        MAIN=main,
        TAIL=tail,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_TOKENS=args.block_tokens,
        HAS_CACHE=args.key_cache is not None,
        HAS_FRESH=args.fresh_key is not None,
        HAS_SOFT_CAP=args.soft_cap > 0,
        HAS_SINKS=args.sinks is not None,
        HAS_ONE_FIELD=args.has_one_field,
        IS_CAUSAL_ONLY=not (args.window or args.chunk_tokens),
        PRECISION=args.precision,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
