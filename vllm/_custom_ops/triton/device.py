"""What host code asks about the GPU that a kernel runs on.

Called where a launch's tiles and grid are chosen. A CPU stands for a small GPU before Hopper: there
the interpreter plays it.
"""

from __future__ import annotations

import functools

import torch

_INTERPRETED_PROCESSORS = 4
_HOPPER = (9, 0)


@functools.cache
def count_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return whether a device has what Hopper (sm_90) brought."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER


@functools.cache
def has_warp_group_products(device: torch.device) -> bool:
    """Return whether warp groups multiply tiles in shared memory, which sm_90 alone does."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] == _HOPPER[0]
