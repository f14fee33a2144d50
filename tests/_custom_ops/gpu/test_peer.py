"""Sums over ranks, whose ranks here are streams of one GPU: real kernels that wait for each other.

Two processes on two GPUs: tests/distributed/gpu/test_custom_all_reduce.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests._custom_ops.gpu.tensors import DTYPES, NEEDS_GPU, draw
from vllm._custom_ops import peer as ops
from vllm.distributed.communication_op import add_in_rank_order
from vllm.errors import ShapeError

pytestmark = NEEDS_GPU
PATIENCE_MS = 2000
SIZES = (8, 24, 2048, 7168, 100_000, 131_072)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Memory and streams of some ranks on one GPU."""

    inboxes: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]
    streams: tuple[torch.cuda.Stream, ...]

    def add(self, shares: list[Tensor]) -> list[Tensor]:
        """Run the op on every rank at once and return what each has."""
        addresses = torch.tensor([inbox.data_ptr() for inbox in self.inboxes])
        outs = [torch.full_like(share, float("nan")) for share in shares]
        torch.cuda.synchronize()
        for rank, (out, share) in enumerate(zip(outs, shares, strict=True)):
            with torch.cuda.stream(self.streams[rank]):
                ops.all_reduce_peers(
                    out, share, self.counts[rank], addresses, rank, PATIENCE_MS, True
                )
        torch.cuda.synchronize()
        return outs

    def count_lost(self) -> int:
        return sum(int(counts[-1]) for counts in self.counts)


def make_ranks(size: int, dtype: torch.dtype) -> Ranks:
    ranks = Ranks(
        inboxes=tuple(
            torch.zeros(ops.inbox_bytes(size), dtype=torch.uint8, device="cuda")
            for _ in range(size)
        ),
        counts=tuple(torch.zeros(65, dtype=torch.int32, device="cuda") for _ in range(size)),
        streams=tuple(torch.cuda.Stream() for _ in range(size)),
    )
    # A kernel's first launch waits for what runs, and what runs waits for that kernel: the first
    # messages may be lost.
    ranks.add([torch.zeros(8, dtype=dtype, device="cuda") for _ in range(size)])
    for counts in ranks.counts:
        counts[-1] = 0
    return ranks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_every_rank_has_the_sum_in_rank_order(size: int, dtype: torch.dtype) -> None:
    ranks = make_ranks(size, dtype)
    for seed, numel in enumerate((*SIZES, *reversed(SIZES))):
        shares = [draw(1, numel, dtype=dtype, seed=100 * seed + r)[0] for r in range(size)]
        expected = add_in_rank_order(shares)
        for out in ranks.add(shares):
            assert torch.equal(out, expected), f"message {seed} of {numel} numbers"
    assert ranks.count_lost() == 0


def test_the_longest_tensor_and_the_count_past_its_end() -> None:
    ranks = make_ranks(2, torch.float32)
    for counts in ranks.counts:
        counts[:-1] = -2  # two messages before the 32 bits begin anew
    for seed in range(4):
        shares = [draw(1, 1 << 18, dtype=torch.float32, seed=seed + r)[0] for r in range(2)]
        expected = add_in_rank_order(shares)
        assert all(torch.equal(out, expected) for out in ranks.add(shares))
    assert ranks.count_lost() == 0
    assert int(ranks.counts[0][0]) == 4, "zero, what an empty inbox holds, marks no message"


def test_a_missing_rank_is_counted_in_a_trial() -> None:
    ranks = make_ranks(2, torch.float32)
    addresses = torch.tensor([inbox.data_ptr() for inbox in ranks.inboxes])
    share = draw(1, 8, dtype=torch.float32)[0]
    ops.all_reduce_peers(torch.empty_like(share), share, ranks.counts[0], addresses, 0, 20, True)
    torch.cuda.synchronize()
    assert ranks.count_lost() == 2, "both packs"


def test_memory_that_is_not_there_leaves_no_error_behind() -> None:
    handle = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="allocate_peer_memory"):
        ops.allocate_peer_memory(0, 1 << 50, handle)
    with pytest.raises(RuntimeError, match="open_peer_memory"):
        ops.open_peer_memory(0, handle)
    ranks = make_ranks(2, torch.float32)  # its launches would find it
    assert ranks.count_lost() == 0


@pytest.mark.parametrize(
    ("numel", "num_ranks", "rank", "message"),
    [
        (6, 2, 0, "multiples of 16"),
        ((1 << 18) + 4, 2, 0, "up to 1048576"),
        (8, 3, 0, "allowed: 2, 4, 6, 8"),
        (8, 2, 2, "rank is 2, allowed: 0 to 1"),
    ],
)
def test_what_cannot_be_summed(numel: int, num_ranks: int, rank: int, message: str) -> None:
    share = torch.zeros(numel, device="cuda")
    counts = torch.zeros(65, dtype=torch.int32, device="cuda")
    addresses = torch.zeros(num_ranks, dtype=torch.int64)
    with pytest.raises(ShapeError, match=message):
        ops.all_reduce_peers(torch.empty_like(share), share, counts, addresses, rank, 1, True)
