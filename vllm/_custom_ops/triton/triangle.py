"""The inverse of a unit lower triangular tile, inside of a kernel: small blocks first, then pairs.

Inlined into `delta_chunks.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SUB = tl.constexpr(4)  # rows of a block that is inverted by substitution
_SUB_LEVEL = tl.constexpr(2)  # 2 to it


@triton.jit
def _invert_diagonal(below, CHUNK: tl.constexpr):
    """Return the inverses of the diagonal blocks of I + below, zero beside them.

    Column by column, in float32: after step i row i is final and is taken out of all rows under it.
    """
    BLOCKS: tl.constexpr = CHUNK // _SUB
    block = tl.arange(0, BLOCKS)
    is_own = block[:, None, None, None] == block[None, None, :, None]
    parts = tl.reshape(below, [BLOCKS, _SUB, BLOCKS, _SUB])
    parts = tl.sum(tl.where(is_own, parts, 0.0), axis=2)
    row = tl.arange(0, _SUB)[None, :, None]
    column = tl.arange(0, _SUB)[None, None, :]
    inverse = tl.where(row == column, 1.0, 0.0) + tl.zeros_like(parts)
    for i in range(_SUB - 1):
        factor = tl.sum(tl.where(column == i, parts, 0.0), axis=2)
        final = tl.sum(tl.where(row == i, inverse, 0.0), axis=1)
        inverse -= factor[:, :, None] * final[:, None, :]
    inverse = tl.broadcast_to(inverse[:, :, None, :], [BLOCKS, _SUB, BLOCKS, _SUB])
    return tl.reshape(tl.where(is_own, inverse, 0.0), [CHUNK, CHUNK])


@triton.jit
def invert(
    below,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the inverse of I + below, where `below` is strictly lower triangular.

    Diagonal blocks of twice the size are inverted from those of one size by
        [[P, 0], [R, Q]]^-1 = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]],
    all blocks of a level in one product of operands of type INNER. Unlike powers of `below` this
    does not cancel when keys resemble each other.
    """
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    inverse = _invert_diagonal(below, CHUNK)
    for level in tl.static_range(_SUB_LEVEL, LEVELS):
        is_corner = ((row >> (level + 1)) == (column >> (level + 1))) & (
            (row >> level) != (column >> level)
        )
        corner, known = tl.where(is_corner, below, 0.0).to(INNER), inverse.to(INNER)
        corner = tl.dot(known, corner, input_precision=PRECISION).to(INNER)
        inverse -= tl.dot(corner, known, input_precision=PRECISION)
    return inverse
