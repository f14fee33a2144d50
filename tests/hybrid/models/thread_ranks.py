"""Tensor-parallel ranks as threads of one process: real collectives without process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from vllm.distributed.parallel_state import TensorParallel

Result = TypeVar("Result")
_TIMEOUT_S = 60.0


class _Meeting:
    """Where the ranks of one group exchange tensors."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self._given: dict[int, Tensor] = {}

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order."""
        self._given[rank] = tensor.clone()
        self._barrier.wait()
        all_given = [self._given[i] for i in sorted(self._given)]
        self._barrier.wait()
        return all_given


class ThreadRank(TensorParallel):
    """One rank among threads."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See TensorParallel."""
        total, *others = self._meeting.exchange(self.rank, tensor)
        for other in others:
            total = total + other
        return total

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """See TensorParallel."""
        return torch.cat(self._meeting.exchange(self.rank, tensor), dim)


def run_ranks(size: int, work: Callable[[TensorParallel], Result]) -> list[Result]:
    """Call `work` once for each rank, all at the same time, and return what they return."""
    meeting = _Meeting(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, [ThreadRank(i, size, meeting) for i in range(size)]))
