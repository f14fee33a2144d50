"""States behind 2**31 elements of an arena: offsets are widened before they meet a stride."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests._custom_ops.triton.test_large_arenas import check_far
from tests.utils.ops import poisoned, random_rows
from tests.utils.paged import cumulative
from vllm._custom_ops.triton import causal_conv, delta_rule, mamba2


def draw(*shape: int, device: str, seed: int = 3) -> Tensor:
    """Return random float32 rows on a device."""
    return random_rows(*shape, dtype=torch.float32, seed=seed).to(device)


def convolve(view: Tensor, offset: Tensor, num_new: int, device: str) -> Tensor:
    out = poisoned((num_new, 40), torch.float32).to(device)
    rows = offset, cumulative([num_new]).to(device), torch.full_like(offset, 5)
    x, weight = draw(num_new, 40, device=device), draw(3, 40, device=device).T
    causal_conv.causal_conv1d(out, x, weight, None, view.transpose(1, 2), *rows, True)
    return out


def run_delta_rule(view: Tensor, offset: Tensor, num_new: int, device: str) -> Tensor:
    out = poisoned((num_new, 2, 32), torch.float32).to(device)
    rows = offset, cumulative([num_new]).to(device), torch.full_like(offset, 5)
    q, k = (draw(num_new, 1, 16, device=device, seed=seed) for seed in (4, 5))
    g, beta = -draw(num_new, 2, device=device).abs(), draw(num_new, 2, device=device).sigmoid()
    v = draw(num_new, 2, 32, device=device)
    delta_rule.gated_delta_rule(out, q, k, v, g, beta, view, *rows, 0.25, True)
    return out


def scan(view: Tensor, offset: Tensor, num_new: int, device: str) -> Tensor:
    out = poisoned((num_new, 2, 16), torch.float32).to(device)
    rows = offset, cumulative([num_new]).to(device), torch.full_like(offset, 5)
    x, dt = draw(num_new, 2, 16, device=device), draw(num_new, 2, device=device)
    b, c = (draw(num_new, 1, 32, device=device, seed=seed) for seed in (4, 5))
    decay = -draw(2, device=device).exp()
    limits = (0.0, float("inf"))
    mamba2.mamba2_scan(out, x, dt, decay, b, c, None, None, view, *rows, *limits)
    return out


@pytest.mark.parametrize("num_new", [1, 70], ids=["token by token", "in chunks"])
@pytest.mark.parametrize(
    ("run", "shape"), [(convolve, (2, 40)), (run_delta_rule, (2, 16, 32)), (scan, (2, 16, 32))]
)
def test_states(
    device: str, run: Callable[..., Tensor], shape: tuple[int, ...], num_new: int
) -> None:
    check_far(lambda view, offset: run(view, offset, num_new, device), shape, torch.float32, device)
