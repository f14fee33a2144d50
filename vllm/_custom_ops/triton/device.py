"""What host code asks about the GPU that a kernel runs on.

Called where a launch's tiles and grid are chosen. A CPU stands for a small GPU before Hopper: there
the interpreter plays it.

Tiles are made for the shared memory of an A100 (163 KiB a block) and an H200 (227 KiB). Where there
is less (99 KiB on sm_86, sm_89 and sm_120), fewer tiles are under way, or smaller ones.
"""

from __future__ import annotations

import functools

import torch

_INTERPRETED_PROCESSORS = 4
_INTERPRETED_SHARED_BYTES = 163 << 10  # as an A100
_HOPPER = (9, 0)
_HOPPER_SHARED_BYTES = 227 << 10


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


@functools.cache
def find_shared_bytes(device: torch.device) -> int:
    """Return how many bytes of shared memory a block of a kernel can have."""
    if device.type != "cuda":
        return _INTERPRETED_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    # torch has it, its stubs do not
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def holds_hopper_tiles(device: torch.device) -> bool:
    """Return whether tiles made for Hopper fit a device that has what Hopper brought."""
    return is_hopper(device) and find_shared_bytes(device) >= _HOPPER_SHARED_BYTES


def fit_stages(num_stages: int, tile_bytes: int, other_bytes: int, device: torch.device) -> int:
    """Return how many stages of a kernel's loop fit, at least 1.

    Args:
        num_stages: wanted; all but one have their tiles in shared memory.
        tile_bytes: what one of them has there.
        other_bytes: what else is there at the same time.
        device: where the kernel runs.
    """
    room = find_shared_bytes(device) - other_bytes
    return max(1, min(num_stages, room // tile_bytes + 1))
