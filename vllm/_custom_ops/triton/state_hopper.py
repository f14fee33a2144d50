"""What Hopper's kernels of layers with a state share: where chunks lie, and where a row ends.

Used by what the warps of `mamba2_hopper.py` and `delta_hopper.py` do. The copy engine brings tiles
of CHUNK tokens of one head; it knows no ends of rows, so that a row's last tile may hold tokens of
the next row, or what lies behind all rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared


@gluon.jit
def find_item(item, cu_query_lens, num_computed, HEADS: gl.constexpr, CHUNK: gl.constexpr):
    """Return (head, row, first token, end, chunks, place of the first, tokens before the step).

    Padding rows have no chunks. Places are those of `state_rows.py`.
    """
    head = item % HEADS
    row = item // HEADS
    begin = gl.load(cu_query_lens + row)
    end = gl.load(cu_query_lens + row + 1)
    computed = gl.load(num_computed + row)
    place = begin // CHUNK - gl.load(cu_query_lens) // CHUNK + row
    num_chunks = gl.where(computed < 0, 0, (end - begin + CHUNK - 1) // CHUNK)
    return head, row, begin, end, num_chunks, place, computed


@gluon.jit
def clear_behind(rows, left, CHUNK: gl.constexpr, WIDTH: gl.constexpr):
    """Zero the rows of a tile from `left` on, which may be NaN: weights of 0 would not hide it.

    Two warp groups may do so at once: what they write is the same.
    """
    PART: gl.constexpr = 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    is_token = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT)) < left
    for i in gl.static_range(WIDTH // PART):
        part = rows.slice(i * PART, PART, dim=1)
        own = part.load(LAYOUT)
        part.store(gl.where(is_token[:, None], own, gl.zeros_like(own)))
    fence_async_shared()
