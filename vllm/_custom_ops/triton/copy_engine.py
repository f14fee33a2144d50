"""What Hopper's copy engine brings to shared memory: tiles of tensors that lie as it wants them.

Used by the kernels written in Gluon (`*_hopper.py`). To the engine a tensor is a matrix: its rows
are those of the first axis, its columns all numbers from a row's first to its last, so that a head
begins at the column of its index times its stride. Behind the last row the engine brings zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm._custom_ops.triton.device import has_warp_group_products
from vllm._custom_ops.triton.launch import knows_triton

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
"""Element types of tiles, which are what products of warp groups take here."""

_COPY_BYTES = 16  # what addresses and strides are multiples of


def runs_hopper_kernels(device: torch.device) -> bool:
    """Return whether a device is a Hopper, and Triton the one whose Gluon they are written in."""
    return has_warp_group_products(device) and knows_triton()


def can_copy(rows: Tensor) -> bool:
    """Return whether the copy engine brings tiles of [T, H, D] or [N, K], as they lie."""
    row_bytes = rows.stride(0) * rows.element_size()
    return (
        rows.dtype in DTYPES
        and rows.stride(-1) == 1
        and rows.data_ptr() % _COPY_BYTES == 0
        and row_bytes % _COPY_BYTES == 0
    )


def describe_tiles(rows: Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """Return what the copy engine needs to know of tiles of so many rows and columns.

    Args:
        rows: such that `can_copy`.
    """
    block = [num_rows, num_columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[rows.dtype])
    inner = zip(rows.shape[1:], rows.stride()[1:], strict=True)
    width = 1 + sum((size - 1) * stride for size, stride in inner)
    return TensorDescriptor(rows, [rows.shape[0], width], [rows.stride(0), 1], block, layout)
