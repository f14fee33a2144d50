"""Memory on every GPU of a host that all ranks reach.

Made by `custom_all_reduce.py`. The ranks are processes; rank r has GPU r.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm._custom_ops import peer as peer_ops

_HANDLE_BYTES = 64

Exchange = Callable[[Tensor], list[Tensor]]
"""Gives every rank's tensor, in rank order, for that of this rank, all on the CPU; a collective."""


class PeerMemory:
    """One piece of memory a rank, zeros at first, all of one size."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._addresses = [0] * size  # by rank; 0: not there

    @staticmethod
    def connect(rank: int, size: int, num_bytes: int, exchange: Exchange) -> PeerMemory | None:
        """Allocate this rank's memory and open the others'; a collective.

        Returns:
            None on every rank if one of them could not.
        """
        memory = PeerMemory(rank, size)
        is_open = memory._open(num_bytes, exchange)
        if all(bool(answer) for answer in exchange(torch.tensor([is_open]))):
            return memory
        memory.close()
        exchange(torch.tensor([True]))  # memory is freed when nobody has it open
        memory._free()
        return None

    @property
    def addresses_R(self) -> Tensor:
        """Where this process sees each rank's memory, int64 [R] on the CPU."""
        return torch.tensor(self._addresses, dtype=torch.int64)

    def close(self) -> None:
        """Close what is the others'; safe to call twice.

        This rank's own goes with the process: others may still have it open.
        """
        for other, address in enumerate(self._addresses):
            if other != self._rank and address:
                peer_ops.close_peer_memory(self._rank, address)
                self._addresses[other] = 0

    def _open(self, num_bytes: int, exchange: Exchange) -> bool:
        handle = torch.zeros(_HANDLE_BYTES, dtype=torch.uint8)
        try:
            self._addresses[self._rank] = peer_ops.allocate_peer_memory(
                self._rank, num_bytes, handle
            )
        except RuntimeError:
            exchange(handle)
            return False
        handles = exchange(handle)
        try:
            for other, theirs in enumerate(handles):
                if other != self._rank:
                    self._addresses[other] = peer_ops.open_peer_memory(self._rank, theirs)
        except RuntimeError:  # theirs failed, or the driver does not share
            return False
        return True

    def _free(self) -> None:
        if self._addresses[self._rank]:
            peer_ops.free_peer_memory(self._rank, self._addresses[self._rank])
            self._addresses[self._rank] = 0
