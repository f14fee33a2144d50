"""Between our element types and torch's. The one file of `utils` that imports torch."""

from __future__ import annotations

import torch

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
