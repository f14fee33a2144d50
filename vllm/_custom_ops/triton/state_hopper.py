"""What Hopper's kernels of layers with a state share: where chunks lie, and tiles of their rows.

Used by `mamba2_hopper.py` and `delta_hopper.py` and by what their warps do. The copy engine brings
tiles of CHUNK tokens of one head; it knows no ends of rows, so that a row's last tile may hold
tokens of the next row, or what lies behind all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

COPY_BYTES = 16
"""What addresses and strides of the copy engine are multiples of."""

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
"""Operands that products of warp groups take here."""


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


def can_copy(rows_THD: Tensor) -> bool:
    """Return whether the copy engine brings tiles of heads of 16-bit numbers, as they lie."""
    token_bytes = rows_THD.stride(0) * rows_THD.element_size()
    return (
        rows_THD.dtype in DTYPES
        and rows_THD.stride(2) == 1
        and rows_THD.data_ptr() % COPY_BYTES == 0
        and token_bytes % COPY_BYTES == 0
    )


def describe_tiles(rows_THD: Tensor, chunk: int, width: int) -> TensorDescriptor:
    """Return what the copy engine needs to know of tiles of so many tokens and numbers of a head.

    Args:
        rows_THD: such that `can_copy`; a tile's first column is the head times its stride.
    """
    tokens, heads, size = rows_THD.shape
    token_stride, head_stride, _ = rows_THD.stride()
    block, dtype = [chunk, width], DTYPES[rows_THD.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    columns = (heads - 1) * head_stride + size
    return TensorDescriptor(rows_THD, [tokens, columns], [token_stride, 1], block, layout)
