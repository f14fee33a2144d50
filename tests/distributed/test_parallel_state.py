"""Collectives of three gloo ranks, each a process; one rank is the identity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from vllm.distributed.parallel_state import TensorParallel
from vllm.errors import ConfigError


def run_rank(rank: int, size: int, directory: str) -> None:
    """Check every collective on one rank; a failed assertion ends the process with an error."""
    torch.set_num_threads(1)
    tp = TensorParallel.connect(rank, size, f"file://{directory}/rendezvous", timeout_s=60)
    parts = [torch.randn(37, 5, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    for dtype in (torch.float32, torch.bfloat16):
        own = parts[rank].to(dtype)
        total = tp.all_reduce(own)
        ordered = sum((part.to(dtype).float() for part in parts[1:]), parts[0].to(dtype).float())
        assert torch.equal(total, ordered.to(dtype)), "the sum runs in rank order, in float32"
        for row in (0, 17, 36):
            assert torch.equal(tp.all_reduce(own[row : row + 1])[0], total[row])
        for dim in (0, -1):
            joined = torch.cat([part.to(dtype) for part in parts], dim=dim)
            assert torch.equal(tp.all_gather(own, dim=dim), joined)
        strided = own.T
        assert torch.equal(tp.all_gather(strided, dim=0)[: len(strided)], parts[0].to(dtype).T)
    ids = torch.arange(4) + 10 * rank
    assert tp.broadcast(ids, source=size - 1).tolist() == [10 * (size - 1) + i for i in range(4)]
    tp.barrier()
    tp.close()
    tp.close()


def test_collectives(tmp_path: Path) -> None:
    """Three ranks: the fewest for which the order of a sum can be seen."""
    mp.spawn(run_rank, args=(3, str(tmp_path)), nprocs=3, join=True)


def test_one_rank_is_the_identity() -> None:
    tp = TensorParallel.connect(0, 1, "not used")
    tensor = torch.randn(3, 4)
    assert (tp.rank, tp.size) == (0, 1)
    assert tp.all_reduce(tensor) is tensor
    assert tp.all_gather(tensor) is tensor
    assert tp.broadcast(tensor) is tensor
    tp.barrier()
    tp.close()


def test_ranks_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"rank must lie in 0\.\.1, got 2"):
        TensorParallel(2, 2, None)
    with pytest.raises(ConfigError, match="need a process group"):
        TensorParallel(0, 2, None)


def test_shares() -> None:
    assert TensorParallel.single().split(7, "heads") == 7
    tp = TensorParallel(1, 2, object())  # type: ignore[arg-type]
    assert tp.split(8, "heads") == 4
    with pytest.raises(ConfigError, match=r"heads \(9\) cannot be split.*divides it: 1, 3, 9"):
        tp.split(9, "heads")
