"""A tensor-parallel rank that never talks: enough for building and loading."""

from __future__ import annotations

from vllm.distributed.parallel_state import TensorParallel


class FakeRank(TensorParallel):
    """One of `size` ranks, without the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self._group = rank, size, None
