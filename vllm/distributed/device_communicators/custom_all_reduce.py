"""Sums of short tensors over the GPUs of a host, each in one kernel of ours.

Made and called by `parallel_state.py`. What a decode step adds up is short, and a library's way of
several steps then takes longer than the numbers do. Longer tensors, other numbers of ranks and GPUs
that do not reach each other are left to the library.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vllm._custom_ops import peer as peer_ops
from vllm.distributed.communication_op import add_in_rank_order, gather_tensors
from vllm.distributed.device_communicators.peer_memory import PeerMemory
from vllm.logger import init_logger

logger = init_logger(__name__)

LIMIT_BYTES = {2: 1 << 20, 4: 512 << 10, 6: 256 << 10, 8: 256 << 10}
"""Number of ranks -> the longest tensor that is ours. The longer, the more the marks of arrival
cost that travel with every four bytes."""

_PACK_BYTES = 16
_COUNTS = 65
_TRIAL_ELEMENTS = (8, 4096, 40960)
_TRIAL_MS = 5_000


class CustomAllReduce:
    """The sums of one rank.

    Every rank calls `sum` in the same order, on one stream at a time.

    Args:
        rank: this process's number, and its GPU's.
        memory: where the ranks write to each other.
        patience_ms: after this the device stops with an error, if another rank does not come.
    """

    def __init__(self, rank: int, size: int, memory: PeerMemory, patience_ms: int) -> None:
        self._rank = rank
        self._limit_bytes = LIMIT_BYTES[size]
        self._memory = memory
        self._inboxes_R = memory.addresses_R
        self._counts = torch.zeros(_COUNTS, dtype=torch.int32, device=torch.device("cuda", rank))
        self._patience_ms = patience_ms

    @staticmethod
    def connect(
        rank: int, size: int, group: dist.ProcessGroup, timeout_s: float
    ) -> CustomAllReduce | None:
        """Join the other ranks and try it out; a collective.

        Returns:
            None on every rank if one of them cannot. The log says who adds up, and why.
        """
        device = torch.device("cuda", rank)

        def exchange(tensor: Tensor) -> list[Tensor]:
            return [t.cpu() for t in gather_tensors(tensor.to(device), group, size)]

        can_reach = size in LIMIT_BYTES and all(
            torch.cuda.can_device_access_peer(rank, other) for other in set(range(size)) - {rank}
        )
        if not all(bool(answer) for answer in exchange(torch.tensor([can_reach]))):
            sizes = ", ".join(map(str, LIMIT_BYTES))
            logger.info(
                "sums over GPUs are NCCL's: ours need %s GPUs that reach each other's memory", sizes
            )
            return None
        memory = PeerMemory.connect(rank, size, peer_ops.inbox_bytes(size), exchange)
        if memory is None:
            _say_who_sums("the driver does not let processes share a GPU's memory")
            return None
        sums = CustomAllReduce(rank, size, memory, int(timeout_s * 1e3))
        if not all(bool(answer) for answer in exchange(torch.tensor([sums._try_out(group, size)]))):
            sums.close()
            _say_who_sums("what GPUs write to each other does not arrive")
            return None
        logger.info("short sums over GPUs are ours, up to %d KiB", LIMIT_BYTES[size] >> 10)
        return sums

    def can_sum(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is one of those that are summed here."""
        num_bytes = tensor.numel() * tensor.element_size()
        is_served = tensor.is_floating_point() and tensor.element_size() <= 4
        return is_served and 0 < num_bytes <= self._limit_bytes

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of every rank's `tensor`: in rank order, in float32, rounded once."""
        return self._sum(tensor, self._patience_ms, is_trial=False)

    def close(self) -> None:
        """Let go of the other ranks' memory; safe to call twice. No sum may run any more."""
        torch.cuda.synchronize(self._rank)
        self._memory.close()

    def _sum(self, tensor: Tensor, patience_ms: int, *, is_trial: bool) -> Tensor:
        given = _fill_packs(tensor.contiguous())
        out = torch.empty_like(given)
        peer_ops.all_reduce_peers(
            out, given, self._counts, self._inboxes_R, self._rank, patience_ms, is_trial
        )
        return out.flatten()[: tensor.numel()].view(tensor.shape)

    def _try_out(self, group: dist.ProcessGroup, size: int) -> bool:
        """Return whether sums are right: some drivers promise access and lose what is written.

        The sizes go through one block and many, each twice: messages lie in turn in two places.
        """
        generator = torch.Generator(self._counts.device).manual_seed(self._rank)
        is_right = True
        for num_elements in 2 * _TRIAL_ELEMENTS:
            given = torch.randn(num_elements, device=self._counts.device, generator=generator)
            expected = add_in_rank_order(gather_tensors(given, group, size))
            patience_ms = _TRIAL_MS if is_right else 1  # the ranks keep in step
            is_right &= torch.equal(self._sum(given, patience_ms, is_trial=True), expected)
        return is_right and int(self._counts[-1]) == 0


def _fill_packs(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor that begins with that of `tensor`, in whole packs on their place.

    A row's bits must not depend on how many rows are added up beside it: all of them go one way.
    """
    pack_elements = _PACK_BYTES // tensor.element_size()
    missing = -tensor.numel() % pack_elements
    if missing:
        return F.pad(tensor.flatten(), (0, missing))
    return tensor if tensor.data_ptr() % _PACK_BYTES == 0 else tensor.clone()


def _say_who_sums(reason: str) -> None:
    logger.warning("sums over GPUs are left to NCCL, which takes longer for short ones: %s", reason)
