"""Two processes on two GPUs add up what each has, with our kernel and with the library."""

from __future__ import annotations

import random
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from vllm._custom_ops import peer as peer_ops
from vllm._custom_ops.triton.table import register_triton_ops
from vllm.distributed.device_communicators.custom_all_reduce import LIMIT_BYTES
from vllm.distributed.device_communicators.peer_memory import PeerMemory
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear

SIZE = 2
NUM_MESSAGES = 300
INNER, HIDDEN = 2048, 2048

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < SIZE, reason="needs two GPUs"
    ),
]


def draw_shares(numel: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Return every rank's numbers, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(SIZE)]


def add_up(tp: TensorParallel, numel: int, dtype: torch.dtype, seed: int) -> None:
    shares = draw_shares(numel, dtype, seed)
    total = tp.all_reduce(shares[tp.rank].cuda(tp.rank))
    expected = (shares[0].float() + shares[1].float()).to(dtype)
    assert torch.equal(total.cpu(), expected), f"{numel} numbers of {dtype}, seed {seed}"


def replay_sums(tp: TensorParallel) -> None:
    """Capture two sums in a row and replay them on new numbers."""
    static = torch.zeros(3584, dtype=torch.bfloat16, device=torch.device("cuda", tp.rank))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = tp.all_reduce(tp.all_reduce(static))
    for seed in range(20):
        shares = draw_shares(3584, torch.bfloat16, seed)
        static.copy_(shares[tp.rank])
        graph.replay()
        add_up(tp, 64, torch.float32, seed)  # between replays the same inboxes serve others
        once = (shares[0].float() + shares[1].float()).to(torch.bfloat16)
        assert torch.equal(total.cpu(), once + once)


def check_sums(tp: TensorParallel) -> None:
    rng = random.Random(3)  # the same choices on both ranks
    waits = random.Random(tp.rank)
    limit = LIMIT_BYTES[SIZE]
    for seed in range(NUM_MESSAGES):
        dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
        numel = rng.choice((1, 7, 8, 3584, 64 * 3584, limit // dtype.itemsize, limit))
        add_up(tp, numel, dtype, seed)
        if waits.random() < 0.1:
            time.sleep(waits.random() * 0.02)
    strided = torch.arange(64, dtype=torch.float32).reshape(8, 8).T.cuda(tp.rank)
    assert torch.equal(tp.all_reduce(strided), 2 * strided)
    moved = torch.arange(65, dtype=torch.float32).cuda(tp.rank)[1:]
    assert torch.equal(tp.all_reduce(moved), 2 * moved), "not on 16 bytes"
    replay_sums(tp)


def run_rank(rank: int, directory: str, has_custom: bool) -> None:
    torch.cuda.set_device(rank)
    tp = TensorParallel.connect(
        rank,
        SIZE,
        f"file://{directory}/rendezvous",
        "cuda",
        timeout_s=60,
        has_custom_all_reduce=has_custom,
    )
    sums = tp._short_sums
    assert (sums is not None) == has_custom
    if sums is not None:
        device = torch.device("cuda", rank)
        assert sums.can_sum(torch.empty(LIMIT_BYTES[SIZE] // 4, device=device))
        assert not sums.can_sum(torch.empty(LIMIT_BYTES[SIZE] // 4 + 4, device=device))
        assert sums.can_sum(torch.empty(7, dtype=torch.bfloat16, device=device))
        assert not sums.can_sum(torch.empty(8, dtype=torch.int64, device=device))
    check_sums(tp)
    tp.close()
    tp.close()


@pytest.mark.parametrize("has_custom", [True, False])
def test_sums_of_two_processes(has_custom: bool, tmp_path: Path) -> None:
    spawn(run_rank, args=(str(tmp_path), has_custom), nprocs=SIZE, join=True)


def run_layers(rank: int, directory: str) -> None:
    """A matrix split over ranks and the norm behind it, as a decoder layer ends."""
    torch.cuda.set_device(rank)
    register_triton_ops()
    tp = TensorParallel.connect(rank, SIZE, f"file://{directory}/rendezvous", "cuda", timeout_s=60)
    generator = torch.Generator().manual_seed(9)
    with torch.device("cuda", rank):
        linear = RowParallelLinear(
            2 * INNER, HIDDEN, bias=False, dtype=torch.bfloat16, tp=tp, leaves_parts=True
        )
        norm = RMSNorm(HIDDEN, 1e-6, torch.bfloat16)
    weight = torch.randn(HIDDEN, 2 * INNER, generator=generator).mul_(0.02).bfloat16()
    linear.parameter("weight").copy_(weight[:, rank * INNER : (rank + 1) * INNER])
    norm.weight.data.fill_(1.0)
    for rows in (1, 4, 16, 64, 65, 600):  # the last are more than our kernel adds up
        x = torch.randn(rows, 2 * INNER, generator=generator).bfloat16()
        stream = torch.randn(rows, HIDDEN, generator=generator).bfloat16()
        residual = stream.cuda(rank)
        own = x[:, rank * INNER : (rank + 1) * INNER].contiguous().cuda(rank)
        out = norm.add_and_norm(linear.contribute(own), residual)
        exact = stream.double() + x.double() @ weight.double().T
        torch.testing.assert_close(residual.double().cpu(), exact, rtol=2e-2, atol=2e-2)
        normed = exact * exact.square().mean(-1, keepdim=True).rsqrt()
        torch.testing.assert_close(out.double().cpu(), normed, rtol=2e-2, atol=2e-2)
        both = tp.all_gather(residual, dim=0)
        assert torch.equal(both[:rows], both[rows:]), "the same bits on every rank"
    tp.close()


def test_a_split_matrix_and_the_norm_behind_it(tmp_path: Path) -> None:
    spawn(run_layers, args=(str(tmp_path),), nprocs=SIZE, join=True)


def refuse(*_: object) -> int:
    raise RuntimeError("open_peer_memory: not supported")


def run_refused(rank: int, directory: str) -> None:
    """Rank 1 cannot open what is rank 0's: both leave sums to the library."""
    if rank == 1:
        patch.object(peer_ops, "open_peer_memory", refuse).start()
    torch.cuda.set_device(rank)
    tp = TensorParallel.connect(rank, SIZE, f"file://{directory}/rendezvous", "cuda", timeout_s=60)
    assert tp._short_sums is None
    add_up(tp, 64, torch.float32, 0)
    tp.close()


def run_lost(rank: int, directory: str) -> None:
    """What rank 1 writes goes elsewhere: the trial finds it."""
    torch.cuda.set_device(rank)
    if rank == 1:
        nowhere = property(lambda memory: torch.tensor(memory._addresses)[[1, 1]])
        patch.object(PeerMemory, "addresses_R", nowhere).start()
    tp = TensorParallel.connect(rank, SIZE, f"file://{directory}/rendezvous", "cuda", timeout_s=60)
    assert tp._short_sums is None
    add_up(tp, 64, torch.float32, 0)
    tp.close()


@pytest.mark.parametrize("run", [run_refused, run_lost])
def test_without_memory_in_common_the_library_adds(run: object, tmp_path: Path) -> None:
    spawn(run, args=(str(tmp_path),), nprocs=SIZE, join=True)
