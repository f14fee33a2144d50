"""Blocks behind 2**31 elements of an arena: offsets are widened before they meet a stride."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.utils.ops import poisoned, random_rows
from tests.utils.paged import UNIT_BYTES, cumulative
from vllm._custom_ops.triton import attention

LARGE_BYTES = (8 << 30) + (1 << 20)
"""Beyond 2**31 of float32; on a CPU only the pages that are touched take memory."""
ROOM_UNITS = 256

Run = Callable[[Tensor, Tensor], Tensor]
"""Run an op over a cache view and int32 [1], where the row's block lies in it; what it gave."""


def view_last_unit(
    shape: tuple[int, ...], dtype: torch.dtype, num_bytes: int, device: str
) -> tuple[Tensor, int]:
    """Return the view of a field over an arena, and an offset near its end."""
    arena = torch.empty(num_bytes, dtype=torch.uint8, device=device).view(dtype)
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    num_units = num_bytes // UNIT_BYTES - ROOM_UNITS
    unit = UNIT_BYTES // dtype.itemsize
    return arena.as_strided((num_units, *shape), (unit, *strides)), num_units - 1


def check_far(run: Run, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """The same bits come of a block wherever it lies, and are left in it."""
    found = []
    for num_bytes in (2 * ROOM_UNITS * UNIT_BYTES, LARGE_BYTES):
        view, unit = view_last_unit(shape, dtype, num_bytes, device)
        view[unit] = random_rows(*shape, dtype=dtype, seed=1).to(device)
        out = run(view, torch.tensor([unit], dtype=torch.int32, device=device))
        assert not out.isnan().any()
        found.append((out, view[unit].clone()))
    for near, far in zip(*found, strict=True):
        assert torch.equal(near, far)


@pytest.mark.parametrize("num_new", [1, 3], ids=["decode", "prefill"])
def test_attention(device: str, num_new: int) -> None:
    def run(view: Tensor, offset: Tensor) -> Tensor:
        out = poisoned((num_new, 2, 32), torch.bfloat16).to(device)
        query = random_rows(num_new, 2, 32, dtype=torch.bfloat16, seed=2).to(device)
        lens = torch.tensor([4], dtype=torch.int32, device=device)
        bounds = cumulative([num_new]).to(device)
        attention.paged_attention(out, query, view, view, offset[:, None], bounds, lens, 0.2)
        return out

    check_far(run, (4, 1, 32), torch.bfloat16, device)
