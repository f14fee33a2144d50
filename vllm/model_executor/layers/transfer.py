"""Small arrays to the device and small tensors back, without making the host wait.

Called by the sampler and its rules. On a CPU nothing is copied: arrays become tensors that share
their memory, tensors are read where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT_BYTES = 16  # between arrays of one copy, so that each can be viewed as its own dtype


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return contiguous arrays as tensors on `device`, in one asynchronous copy.

    The tensors are valid for work queued on the current stream after the call; on a CPU they share
    the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    staging = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    view = staging.numpy()
    for array, start in zip(arrays, starts, strict=False):
        view[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    # Torch keeps the pinned memory from being used again before the copy is done.
    copied = staging.to(device, non_blocking=True)
    return [
        copied[start : start + array.nbytes].view(_TO_TORCH[array.dtype]).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


_TO_TORCH = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


class Download:
    """Tensors on their way to the host; on a CPU they are there already.

    Args:
        tensors: copied in stream order; they may be changed by work queued later.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if self._tensors[0].device.type == "cpu":
            return
        self._tensors = [
            torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
            for t in tensors
        ]
        self._event = torch.cuda.current_stream(tensors[0].device).record_event()

    def wait(self) -> list[Tensor]:
        """Return the tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
