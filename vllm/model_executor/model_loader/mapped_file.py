"""Files mapped into memory, seen as tensors without copying.

Used by the safetensors and GGUF readers. Pages that have been used are given back, so that loading
holds one tensor of the file at a time beside the model. Knows nothing of formats.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.errors import WeightError


class MappedFiles:
    """Maps files as they are asked for; views stay valid as long as somebody holds them."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def view(self, path: Path, offset_bytes: int, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return bytes of a file, uint8, without copying.

        Raises:
            WeightError: the file ends before them.
        """
        data = self._map(path)
        if offset_bytes + num_bytes > len(data):
            raise WeightError(
                f"{path} has been cut short: {num_bytes} bytes are wanted at {offset_bytes}, "
                f"the file has {len(data)}. Fetch it again."
            )
        return np.frombuffer(data, np.uint8, num_bytes, offset_bytes)

    def release(self, path: Path, offset_bytes: int, num_bytes: int) -> None:
        """Give the pages of a range back; a view that is still used reads them again."""
        start = offset_bytes - offset_bytes % mmap.PAGESIZE
        self._map(path).madvise(mmap.MADV_DONTNEED, start, offset_bytes + num_bytes - start)

    def _map(self, path: Path) -> mmap.mmap:
        data = self._maps.get(path)
        if data is None:
            with open(path, "rb") as file:
                # Private and writable: torch wants writable memory, and nobody writes to it.
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[path] = data
        return data


def as_tensor(raw: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return bytes as a tensor; they are copied only where the file has them unaligned."""
    flat = raw.reshape(-1)
    if not flat.size:
        return torch.empty(shape, dtype=dtype)
    if flat.ctypes.data % dtype.itemsize:
        flat = flat.copy()
    return torch.frombuffer(flat, dtype=dtype).reshape(shape)
