"""What overlaps kernels compiles to nothing in the interpreter, and loses no result on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl

from vllm._custom_ops.triton.device import is_hopper
from vllm._custom_ops.triton.overlap import (
    await_inputs,
    let_next_start,
    overlaps,
    prefetch_lines,
    prefetch_spans,
)


@triton.jit
def _add_kernel(out, x, weight, N, OVERLAPS: tl.constexpr, BLOCK: tl.constexpr):
    let_next_start(OVERLAPS)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    prefetch_lines(weight + places, OVERLAPS)
    spans = tl.minimum(tl.maximum(N - places, 0), 8) * 4 // 16 * 16
    prefetch_spans(weight + places // 8 * 8, spans, OVERLAPS)
    await_inputs(OVERLAPS)
    is_in = places < N
    total = tl.load(x + places, mask=is_in) + tl.load(weight + places, mask=is_in)
    tl.store(out + places, total, mask=is_in)


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels may overlap."""
    monkeypatch.setenv("VLLM_OVERLAP_KERNELS", "1")
    overlaps.cache_clear()
    yield
    overlaps.cache_clear()


@pytest.mark.usefixtures("overlap")
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
def test_devices_overlap_where_they_can_and_may(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for allowed in ("0", "1"):
        monkeypatch.setenv("VLLM_OVERLAP_KERNELS", allowed)
        overlaps.cache_clear()
        is_hopper.cache_clear()
        assert overlaps(torch.device("cuda", 0)) == (allowed == "1" and capability >= (9, 0))
    overlaps.cache_clear()
    is_hopper.cache_clear()


@pytest.mark.usefixtures("overlap")
def test_a_cpu_overlaps_nothing() -> None:
    assert not overlaps(torch.device("cpu"))
