"""Small arrays of a step on their way to the GPU: one pinned buffer, one asynchronous copy.

Used by `gpu_input_batch.py`. The slots of the ring are written in turn; a slot is written again
only when its last copy is through, which in a pipeline of two steps it always is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int64Array = NDArray[np.int64]

_NUM_SLOTS = 3


class StagingRing:
    """Pinned int64 buffers.

    Args:
        num_elements: of each buffer; larger loads are pinned for the occasion.
    """

    def __init__(self, num_elements: int, device: torch.device) -> None:
        self._device = device
        self._slots = [
            torch.empty(num_elements, dtype=torch.int64, pin_memory=True) for _ in range(_NUM_SLOTS)
        ]
        self._events = [torch.cuda.Event() for _ in range(_NUM_SLOTS)]
        self._next = 0

    def upload(self, arrays: Sequence[Int64Array], target: Tensor | None = None) -> list[Tensor]:
        """Copy arrays to the device, asynchronously, behind one another.

        Args:
            arrays: int64, one dimension each.
            target: int64 device memory to copy into; None allocates.

        Returns:
            A device view of each array.
        """
        total = sum(len(array) for array in arrays)
        slot, event = self._take_slot(total)
        view = slot.numpy()
        start = 0
        for array in arrays:
            view[start : start + len(array)] = array
            start += len(array)
        if target is None:
            target = torch.empty(total, dtype=torch.int64, device=self._device)
        target[:total].copy_(slot[:total], non_blocking=True)
        if event is not None:
            event.record()
        views, start = [], 0
        for array in arrays:
            views.append(target[start : start + len(array)])
            start += len(array)
        return views

    def _take_slot(self, num_elements: int) -> tuple[Tensor, torch.cuda.Event | None]:
        if num_elements > len(self._slots[0]):  # torch keeps the memory until the copy is through
            return torch.empty(num_elements, dtype=torch.int64, pin_memory=True), None
        index, self._next = self._next, (self._next + 1) % _NUM_SLOTS
        self._events[index].synchronize()
        return self._slots[index], self._events[index]
