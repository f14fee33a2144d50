"""What both attention kernels do with a tile of keys: which tiles a query sees, where the rows of a
tile lie, and one step of the online softmax.

Called by `attention_decode.py` and `attention_prefill.py`, inside kernels only. Tiles stand at
multiples of their length in the sequence, whatever the chunk or the window, so that a query meets
the same tiles in the same order however its prompt was cut.

A head of D elements is worked on in two parts of 2**i elements, MAIN and TAIL (0 is none), the last
one masked: 576 is 512 + 64. Tiles that no query sees are not visited, rows of a visited tile that
no query sees are not loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_visible(position, window, chunk_tokens):
    """Return the first key that `position` sees, sink tokens aside."""
    return tl.maximum(tl.maximum(position - window + 1, position // chunk_tokens * chunk_tokens), 0)


@triton.jit
def sees(query_position, position, window, sink_tokens, chunk_tokens):
    """Return which keys each query sees, [M, N], from positions [M] and [N]."""
    from_here = first_visible(query_position, window, chunk_tokens)[:, None]
    is_near = (position[None, :] >= from_here) | (position < sink_tokens)[None, :]
    return is_near & (position[None, :] <= query_position[:, None])


@triton.jit
def count_tiles(first, last, sink_tokens, BLOCK_N: tl.constexpr):
    """Count the tiles that hold keys first … last, or sink tokens before them.

    Returns:
        (tiles of sink tokens that are visited before the others, index of the tile of `first`,
        tiles in all).
    """
    first_tile = first // BLOCK_N
    num_sink_tiles = tl.minimum(tl.cdiv(sink_tokens, BLOCK_N), first_tile)
    return num_sink_tiles, first_tile, num_sink_tiles + last // BLOCK_N + 1 - first_tile


@triton.jit
def tile_start(tile, num_sink_tiles, first_tile, BLOCK_N: tl.constexpr):
    """Return the first key of the i-th tile visited."""
    return tl.where(tile < num_sink_tiles, tile, tile - num_sink_tiles + first_tile) * BLOCK_N


@triton.jit
def locate_rows(
    block_offsets,
    position,
    is_read,
    num_cached,
    first_fresh,
    unit_stride,
    token_stride,
    fresh_stride,
    BLOCK_TOKENS: tl.constexpr,
    HAS_CACHE: tl.constexpr,
):
    """Return where the rows of positions lie: elements into the cache, and into the new rows.

    Args:
        block_offsets: the sequence's block table; an entry counts in units.
        is_read: rows that are loaded; the places of others mean nothing.
        num_cached: positions from here on are new.
        first_fresh: token of the batch at position `num_cached`.
    """
    fresh = (first_fresh + position - num_cached).to(tl.int64) * fresh_stride
    cached = fresh
    if HAS_CACHE:
        is_cached = is_read & (position < num_cached)
        unit = tl.load(block_offsets + position // BLOCK_TOKENS, mask=is_cached, other=0)
        cached = unit.to(tl.int64) * unit_stride + position % BLOCK_TOKENS * token_stride
    return cached, fresh


@triton.jit
def point_rows(
    cache,
    fresh,
    cached_place,
    fresh_place,
    is_cached,
    HAS_CACHE: tl.constexpr,
    HAS_FRESH: tl.constexpr,
):
    """Return pointers to rows of K or V, from one head's pointers into the cache and the batch."""
    if not HAS_CACHE:
        return fresh + fresh_place
    elif HAS_FRESH:
        return tl.where(is_cached, cache + cached_place, fresh + fresh_place)
    else:
        return cache + cached_place


@triton.jit
def load_part(
    rows,
    is_row,
    START: tl.constexpr,
    PART: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    IS_MASKED: tl.constexpr = True,
):
    """Load elements START … START + PART - 1 of rows, [rows, PART]; what is masked is 0.

    Without IS_MASKED all rows are loaded.
    """
    element = START + tl.arange(0, PART)
    pointers = rows[:, None] + element[None, :]
    if START + PART <= HEAD_SIZE:
        if IS_MASKED:
            return tl.load(pointers, mask=is_row[:, None], other=0.0)
        else:
            return tl.load(pointers)
    return tl.load(pointers, mask=is_row[:, None] & (element < HEAD_SIZE)[None, :], other=0.0)


@triton.jit
def store_part(
    rows, values, is_row, START: tl.constexpr, PART: tl.constexpr, HEAD_SIZE: tl.constexpr
):
    """Store elements START … of rows, in the element type of the target."""
    element = START + tl.arange(0, PART)
    tl.store(
        rows[:, None] + element[None, :],
        values.to(rows.dtype.element_ty),
        mask=is_row[:, None] & (element < HEAD_SIZE)[None, :],
    )


@triton.jit
def store_head(
    rows,
    main,
    tail,
    divisor,
    is_row,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Store both parts of rows, each row divided by its divisor."""
    divisor = tl.where(is_row, divisor, 1.0)
    store_part(rows, main / divisor[:, None], is_row, 0, MAIN, HEAD_SIZE)
    if TAIL:
        store_part(rows, tail / divisor[:, None], is_row, MAIN, TAIL, HEAD_SIZE)


@triton.jit
def scale_logits(products, scale, soft_cap, HAS_SOFT_CAP: tl.constexpr):
    """Return logits in units of log2, float32."""
    logits = products * scale
    if HAS_SOFT_CAP:
        # tanh(x) as 1 - 2 / (exp(2x) + 1), whose ends are right: exp is 0 or inf there.
        power = tl.exp2(logits * (2.0 * 1.4426950408889634 / soft_cap))
        logits = soft_cap - 2.0 * soft_cap / (power + 1.0)
    return logits * 1.4426950408889634


@triton.jit
def step_softmax(logits, biggest, total):
    """Take one tile of logits into an online softmax (Milakov and Gimelshein, 2018).

    Args:
        logits: [M, N] in units of log2; -inf is unseen.
        biggest: [M] greatest logit so far, -inf before the first.
        total: [M] sum of weights so far.

    Returns:
        (weights [M, N], factor [M] of what was summed before, biggest, total).
    """
    grown = tl.maximum(biggest, tl.max(logits, 1))
    base = tl.where(grown == float("-inf"), 0.0, grown)
    weights = tl.exp2(logits - base[:, None])
    factor = tl.exp2(biggest - base)
    return weights, factor, grown, total * factor + tl.sum(weights, 1)
