"""What the kernels of layers with a state share: where rows and their chunks lie, tiles, softplus.

Inlined into the kernels of `causal_conv.py`, `delta_*.py` and `mamba2*.py`.

Tokens are worked on in chunks that never cross rows. Row b's chunks have the places cu[b] // CHUNK
+ b onwards, which never overlap: a row of n tokens that begins at c fills ceil(n / CHUNK) <=
(c + n) // CHUNK - c // CHUNK + 1 places. So a grid of `count_places` programs covers every step
without the host knowing one length; programs at empty places return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROW_TABLES = ("state_offsets", "cu_query_lens", "num_computed", "lens")
"""Kernels see parts of these that begin anywhere, and are not compiled anew for where."""

_ROWS = tl.constexpr(128)  # lengths that a program compares at once


def count_places(num_tokens: int, num_rows: int, chunk: int) -> int:
    """Return how many programs cover all chunks of any rows with so many tokens."""
    return num_tokens // chunk + num_rows + 1


def is_single_step(num_tokens: int, cu_query_lens: Tensor) -> bool:
    """Return whether rows have one token on average: they are then walked, not cut into chunks."""
    return num_tokens < cu_query_lens.shape[0]


@triton.jit
def load_row(row, cu_query_lens, lens, IS_AFTER: tl.constexpr):
    """Return (first token, end, tokens computed before; negative for a padding row).

    `lens` are tokens before the step or, if IS_AFTER, after it.
    """
    begin = tl.load(cu_query_lens + row)
    end = tl.load(cu_query_lens + row + 1)
    computed = tl.load(lens + row)
    if IS_AFTER:
        computed -= end - begin
    return begin, end, computed


@triton.jit
def find_row(place, cu_query_lens, num_rows, CHUNK: tl.constexpr):
    """Return (row, index of the chunk in its row) of a place; the chunk may lie behind the row."""
    base = tl.load(cu_query_lens) // CHUNK
    num_before = 0
    for start in range(0, num_rows, _ROWS):
        rows = start + tl.arange(0, _ROWS)
        begins = tl.load(cu_query_lens + rows, mask=rows < num_rows, other=0)
        is_before = (begins // CHUNK - base + rows <= place) & (rows < num_rows)
        num_before += tl.sum(is_before.to(tl.int32), axis=0)
    row = num_before - 1
    return row, place - (tl.load(cu_query_lens + row) // CHUNK - base + row)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), for small results by the series of log1p."""
    power = tl.exp(-tl.abs(x))
    series = power * (1.0 - power * (0.5 - power * (1.0 / 3.0 - power * 0.25)))
    return tl.maximum(x, 0.0) + tl.where(power < 0.015625, series, tl.log(1.0 + power))


@triton.jit
def load_tile(x, tokens, at, is_token, is_at, stride):
    """Load rows of a matrix, zero where a token or a column is none."""
    mask = is_token[:, None] & is_at[None, :]
    return tl.load(x + tokens[:, None] * stride + at[None, :], mask=mask, other=0.0)
