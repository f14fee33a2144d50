"""What programs that share a row's keys do for each other: which tiles each takes, what it leaves
in memory, and how the last of them folds that.

Called by `attention_decode.py`, inside its kernel only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm._custom_ops.triton.attention_shape import MAX_SPLITS
from vllm._custom_ops.triton.attention_tile import load_part, store_part

_MAX_SPLITS = tl.constexpr(MAX_SPLITS)


@triton.jit
def fold_splits(
    partial,
    stats,
    num_used,
    split_stride,
    is_head,
    BLOCK_M: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    IS_ALONE: tl.constexpr,
):
    """Fold the splits of one program group in their order; (main, tail, total).

    Their weights come first, from one round of loads; then none of the sums waits for another, and
    where a program is alone on its processor, more of them are under way at once.
    """
    MOST: tl.constexpr = (16384 if IS_ALONE else 8192) // (BLOCK_M * MAIN)
    UNROLL: tl.constexpr = min(8, max(MOST, 1))
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
def take_tiles(split, num_tiles, num_splits, even_splits, long_tiles):
    """Return (first tile of a split, end, splits in use).

    Only a row whose parts would else be long takes more than `even_splits`.
    """
    even_tiles = tl.minimum(tl.cdiv(num_tiles, even_splits), long_tiles)
    size = tl.maximum(tl.cdiv(num_tiles, num_splits), even_tiles)
    begin = split * size
    return begin, tl.minimum(begin + size, num_tiles), tl.cdiv(num_tiles, size)


@triton.jit
def store_split(
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
