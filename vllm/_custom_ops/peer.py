"""Doors of the ops by which GPUs of one host reach each other's memory.

Called by `distributed/device_communicators/`. They have no twins: what they
read and write is the memory of other processes.
"""

from __future__ import annotations

from torch import Tensor

from vllm._custom_ops.library import C


def all_reduce_peers(
    out: Tensor,
    input: Tensor,
    counts: Tensor,
    inboxes: Tensor,
    rank: int,
    patience_ms: int,
    is_trial: bool,
) -> None:
    """Write the sum of every rank's `input`: in rank order, in float32, rounded once.

    All ranks call it in the same order with inputs of one size and dtype, each on one stream at a
    time. Safe in CUDA graphs.

    Args:
        out: like `input`, contiguous.
        input: float32, bfloat16 or float16, contiguous, a multiple of 16 bytes up to 1 MiB.
        counts: int32 [65] on the device, zeros at first: messages so far, and behind them how many
            were lost.
        inboxes: int64 [R] on the CPU, addresses of the ranks' inboxes as this process sees them,
            each of `inbox_bytes(R)` zeros at first; R is 2, 4, 6 or 8.
        rank: whose `input` this is.
        patience_ms: how long another rank is waited for.
        is_trial: count what did not come in time, where else the device stops with an error.

    Raises:
        ShapeError: an argument has the wrong shape, size, dtype or device.
    """
    C.all_reduce_peers(out, input, counts, inboxes, rank, patience_ms, is_trial)


def inbox_bytes(num_ranks: int) -> int:
    """Return how large the inbox of each of `num_ranks` ranks is."""
    return int(C.inbox_bytes(num_ranks))


def allocate_peer_memory(device: int, bytes: int, handle: Tensor) -> int:
    """Return the address of `bytes` zeros on a GPU that other processes can open.

    Args:
        device: number of the GPU.
        bytes: more than 0.
        handle: uint8 [64] on the CPU, written: what `open_peer_memory` takes elsewhere.

    Raises:
        RuntimeError: the memory is not there, or cannot be shared.
    """
    return int(C.allocate_peer_memory(device, bytes, handle))


def open_peer_memory(device: int, handle: Tensor) -> int:
    """Return the address at which this process sees another's memory from a GPU.

    Raises:
        RuntimeError: the GPUs do not reach each other, or the other process is gone.
    """
    return int(C.open_peer_memory(device, handle))


def close_peer_memory(device: int, address: int) -> None:
    """Let go of what `open_peer_memory` returned."""
    C.close_peer_memory(device, address)


def free_peer_memory(device: int, address: int) -> None:
    """Free what `allocate_peer_memory` returned; the others have closed it."""
    C.free_peer_memory(device, address)
