"""What overlaps kernels compiles to nothing in the interpreter, and loses no result on a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from vllm._custom_ops.triton.device import is_hopper
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps


@triton.jit
def _add_kernel(out, x, weight, N, OVERLAPS: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = places < N
    addend = tl.load(weight + places, mask=is_in)
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    tl.store(out + places, tl.load(x + places, mask=is_in) + addend, mask=is_in)


def test_a_chain_of_kernels_sees_every_result(device: str) -> None:
    n = 4096 if device == "cpu" else 1 << 20
    weight = torch.arange(n, dtype=torch.float32, device=device) % 7
    has_overlap = overlaps(weight.device)
    rows = [torch.zeros(n, device=device), torch.zeros(n, device=device)]
    num_kernels = 3 if device == "cpu" else 100
    for step in range(num_kernels):
        _add_kernel[(triton.cdiv(n, 256),)](
            rows[1 - step % 2],
            rows[step % 2],
            weight,
            n,
            OVERLAPS=has_overlap,
            BLOCK=256,
            launch_pdl=has_overlap,
        )
    assert torch.equal(rows[num_kernels % 2], weight * num_kernels)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_devices_overlap_where_they_can(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    is_hopper.cache_clear()
    assert overlaps(torch.device("cuda", 0)) == (capability >= (9, 0))
    is_hopper.cache_clear()


def test_a_cpu_overlaps_nothing() -> None:
    assert not overlaps(torch.device("cpu"))
