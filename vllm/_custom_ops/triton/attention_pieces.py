"""Heads of decode rows in pieces, and what is done with a tile of their keys.

Called by `attention_decode.py` and `attention_splits.py`, inside kernels only. A head of D elements
is a tuple of pieces of at most 128, the last one masked: 576 is four of 128 and one of 64. A thread
copies the same rows of all pieces, so that it works out few addresses, of which a decode kernel's
instructions else mostly consist.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm._custom_ops.triton.attention_tile import scale_logits

NOTHING = tl.constexpr(-1e30)
"""Less than any logit, and finite: exp2(-inf - NOTHING) is 0, exp2(NOTHING - NOTHING) no NaN."""

_PIECE = tl.constexpr(128)


@triton.jit
def load_units(table, first_key, last, BLOCK_N: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Return the block table's entries of keys first_key …, int32 [BLOCK_N].

    What it says of keys behind `last` means nothing.
    """
    position = tl.minimum(first_key + tl.arange(0, BLOCK_N), last)
    return tl.load(table + position // BLOCK_TOKENS, eviction_policy="evict_last")


@triton.jit
def _weigh_keys(logits, biggest):
    """Take one tile of logits into an online softmax (Milakov and Gimelshein, 2018).

    Args:
        logits: [M, N] in units of log2; -inf is unseen.
        biggest: [M] greatest logit so far, NOTHING before the first.

    Returns:
        (weights [M, N], factor [1, M] of what was summed before, biggest).
    """
    grown = tl.maximum(biggest, tl.max(logits, 1))
    return tl.exp2(logits - grown[:, None]), tl.exp2(biggest - grown)[:, None], grown


@triton.jit
def append(pieces, piece):
    """Return a tuple that has one more element."""
    return pieces + (piece,)  # noqa: RUF005 - Triton does not unpack tuples


@triton.jit
def _load_piece(rows, is_row, start, SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    element = start + tl.arange(0, SIZE)
    is_in = is_row[:, None] & (element < HEAD_SIZE)[None, :]
    return tl.load(rows[:, None] + element[None, :], mask=is_in, other=0.0)


@triton.jit
def load_pieces(
    rows, is_row, start, MAIN: tl.constexpr, TAIL: tl.constexpr, HEAD_SIZE: tl.constexpr
):
    """Load elements start … of rows, a tuple of [rows, piece]; what is masked is 0."""
    SIZE: tl.constexpr = min(MAIN, _PIECE)
    pieces = ()
    for i in tl.static_range(MAIN // SIZE):
        pieces = append(pieces, _load_piece(rows, is_row, start + i * SIZE, SIZE, HEAD_SIZE))
    if TAIL:
        pieces = append(pieces, _load_piece(rows, is_row, start + MAIN, TAIL, HEAD_SIZE))
    return pieces


@triton.jit
def _multiply_pieces(
    keys, queries, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr
):
    """Return the products of keys and queries, float32 [M, N]."""
    products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in tl.static_range(len(keys)):
        products = tl.dot(queries[i], tl.trans(keys[i]), products, input_precision=PRECISION)
    return products


@triton.jit
def _add_values(sums, values, weights, factor, PRECISION: tl.constexpr):
    """Return sums [M, piece] times their factor, and values [N, piece] times weights [M, N]."""
    weights = weights.to(values[0].dtype)
    added = ()
    for i in tl.static_range(len(sums)):
        product = tl.dot(weights, values[i], sums[i] * factor, input_precision=PRECISION)
        added = append(added, product)
    return added


@triton.jit
def attend_tile(
    queries,
    key_rows,
    value_rows,
    is_read,
    is_seen,
    biggest,
    shares,
    sums,
    start,
    scale,
    soft_cap,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    VALUE_MAIN: tl.constexpr,
    VALUE_TAIL: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    ARE_VALUES_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take a tile of keys, and its values from element `start` on, into an online softmax.

    Args:
        is_read: [N], rows that are loaded.
        is_seen: [M, N] or [1, N].

    Returns:
        (greatest logits [M], shares [M, N] that are to be added up over the keys in the end, sums
        [M, piece]).
    """
    keys = load_pieces(key_rows, is_read, 0, MAIN, TAIL, HEAD_SIZE)
    products = _multiply_pieces(keys, queries, BLOCK_N, BLOCK_M, PRECISION)
    logits = tl.where(is_seen, scale_logits(products, scale, soft_cap, HAS_SOFT_CAP), float("-inf"))
    weights, factor, biggest = _weigh_keys(logits, biggest)
    values = keys
    if not ARE_VALUES_KEYS:
        values = load_pieces(value_rows, is_read, start, VALUE_MAIN, VALUE_TAIL, HEAD_SIZE)
    sums = _add_values(sums, values, weights, factor, PRECISION)
    return biggest, shares * factor + weights, sums


@triton.jit
def zero_pieces(BLOCK_M: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """Return sums of nothing."""
    SIZE: tl.constexpr = min(MAIN, _PIECE)
    pieces = ()
    for _ in tl.static_range(MAIN // SIZE):
        pieces = append(pieces, tl.zeros((BLOCK_M, SIZE), tl.float32))
    if TAIL:
        pieces = append(pieces, tl.zeros((BLOCK_M, TAIL), tl.float32))
    return pieces


@triton.jit
def scale_pieces(sums, factor):
    """Return sums [M, piece] times factor [M]."""
    scaled = ()
    for i in tl.static_range(len(sums)):
        scaled = append(scaled, sums[i] * factor[:, None])
    return scaled


@triton.jit
def store_pieces(rows, sums, share, is_row, start, HEAD_SIZE: tl.constexpr):
    """Store share [M] of sums [M, piece] as elements start … of rows [M], in their element type."""
    for i in tl.static_range(len(sums)):
        element = start + tl.arange(0, sums[i].shape[1])
        start += sums[i].shape[1]
        is_in = is_row[:, None] & (element < HEAD_SIZE)[None, :]
        tl.store(
            rows[:, None] + element[None, :],
            (sums[i] * share[:, None]).to(rows.dtype.element_ty),
            mask=is_in,
        )
