"""Who the ranks are: the TensorParallel object that is passed down to those who talk to others.

Made once a process by the worker, handed to the model and its layers. There is no global group: a
process may hold several, and a model of one rank needs no process group at all.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch import Tensor

from vllm.distributed.communication_op import gather_ranks, sum_over_ranks
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllReduce
from vllm.errors import ConfigError


class TensorParallel:
    """The ranks that share one model.

    Every method is a collective: all ranks call it, with tensors of one shape and dtype. With one
    rank each is the identity and costs nothing.

    Attributes:
        rank: this process's number, from 0.
        size: number of ranks.
    """

    _short_sums: CustomAllReduce | None = None

    def __init__(
        self,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None,
        short_sums: CustomAllReduce | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"tensor parallel rank must lie in 0..{size - 1}, got {rank}")
        if size > 1 and group is None:
            raise ConfigError(f"{size} tensor parallel ranks need a process group, got none")
        self.rank = rank
        self.size = size
        self._group = group
        self._short_sums = short_sums

    @staticmethod
    def single() -> TensorParallel:
        """Return the group of one rank."""
        return TensorParallel(0, 1, None)

    @staticmethod
    def connect(
        rank: int,
        size: int,
        init_method: str,
        device: str = "cpu",
        timeout_s: float = 600.0,
        *,
        has_custom_all_reduce: bool = True,
    ) -> TensorParallel:
        """Join the other ranks; blocks until all have come.

        Args:
            rank: this process's number.
            size: number of ranks.
            init_method: "tcp://host:port" or "file:///path", the same on every rank.
            device: "cpu" takes gloo, "cuda" takes NCCL on the GPU of the rank's number.
            timeout_s: seconds after which a collective with a missing rank fails.
            has_custom_all_reduce: let our own kernel add up short tensors where GPUs reach each
                other's memory.
        """
        if size == 1:
            return TensorParallel.single()
        dist.init_process_group(
            backend="nccl" if device == "cuda" else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=torch.device("cuda", rank) if device == "cuda" else None,
        )
        group = dist.group.WORLD
        assert group is not None
        short_sums = None
        if device == "cuda" and has_custom_all_reduce:
            short_sums = CustomAllReduce.connect(rank, size, group, timeout_s)
        return TensorParallel(rank, size, group, short_sums)

    def close(self) -> None:
        """Leave the group; safe to call twice."""
        if self._short_sums is not None:
            self._short_sums.close()
        self._short_sums = None
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over the ranks, the same bits on each.

        They are the same in any batch on CPUs and of two GPUs. Of more GPUs, NCCL adds up in an
        order of its own what is not summed by our kernel.
        """
        if self._short_sums is not None and self._short_sums.can_sum(tensor):
            return self._short_sums.sum(tensor)
        return tensor if self._group is None else sum_over_ranks(tensor, self._group, self.size)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Return the ranks' tensors joined along `dim`, in rank order."""
        return tensor if self._group is None else gather_ranks(tensor, self._group, self.size, dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite `tensor` with that of rank `source` and return it."""
        if self._group is not None:
            dist.broadcast(tensor, src=source, group=self._group)
        return tensor

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self._group is not None:
            dist.barrier(group=self._group)

    def split(self, total: int, what: str) -> int:
        """Return this rank's share of `total` equal parts.

        Raises:
            ConfigError: naming `what`, if it cannot be shared evenly.
        """
        if total % self.size:
            allowed = [n for n in range(1, total + 1) if total % n == 0][:12]
            raise ConfigError(
                f"{what} ({total}) cannot be split over tensor_parallel_size={self.size} ranks; "
                f"use a tensor_parallel_size that divides it: {', '.join(map(str, allowed))}"
            )
        return total // self.size
