"""Between our names of types, fields and bytes and torch's; alone in `utils` to import torch."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.cache_spec import BLOCK_ALIGNMENT_BYTES, CacheField
from vllm.types import DType

_TO_TORCH: dict[DType, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.UINT8: torch.uint8,
    DType.FLOAT8_E4M3: torch.float8_e4m3fn,
    DType.FLOAT8_E5M2: torch.float8_e5m2,
}
_FROM_TORCH = {theirs: ours for ours, theirs in _TO_TORCH.items()}


def to_torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's name of an element type."""
    return _TO_TORCH[dtype]


def from_torch_dtype(dtype: torch.dtype) -> DType:
    """Return our name of a torch element type; KeyError if the project does not use it."""
    return _FROM_TORCH[dtype]


def view_cache_field(
    arena: Tensor, field: CacheField, offset_bytes: int, block_bytes: int, block_tokens: int
) -> Tensor:
    """Return a field's strided view of a uint8 arena (shape and stride as in `LayerCache`).

    All fields of a block have views of one length: as many units as whole blocks can start at.

    Args:
        arena: uint8 [bytes], contiguous.
        field: what is stored.
        offset_bytes: byte offset of the field inside a block.
        block_bytes: bytes of a block.
        block_tokens: tokens of a block; unread for a field kept per sequence.
    """
    dtype = to_torch_dtype(field.dtype)
    itemsize = field.dtype.itemsize
    shape = (block_tokens, *field.shape) if field.per == "token" else field.shape
    num_units = max(0, (arena.numel() - block_bytes) // BLOCK_ALIGNMENT_BYTES + 1)
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return arena.view(dtype).as_strided(
        (num_units, *shape),
        (BLOCK_ALIGNMENT_BYTES // itemsize, *strides),
        offset_bytes // itemsize,
    )
