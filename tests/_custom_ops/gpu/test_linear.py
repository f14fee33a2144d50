"""Products of few rows in real shapes on a GPU: against float32, in a graph, again and again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests._custom_ops.gpu.graphs import capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(4608, 3584), (3584, 3584), (3584, 18944), (64, 2048), (1, 2048), (1000, 1416)]
ROWS = [1, 2, 16, 33, 64]


def make(num_rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(n + k)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    return draw(num_rows, k).to(dtype), (draw(n, k) * k**-0.5).to(dtype), draw(n).to(dtype)


def assert_rounded(actual: Tensor, expected: Tensor) -> None:
    """Compare with float32 results: a rounding, or two where gate and up are rounded too."""
    tolerance = 2e-2 if actual.dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_linear_is_near_float32(num_rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    from vllm._custom_ops.triton import linear

    x, weight, bias = make(num_rows, n, k, dtype)
    out = torch.full((num_rows, n), float("nan"), dtype=dtype, device="cuda")
    linear.skinny_linear(out, x, weight, bias)
    assert_rounded(out, F.linear(x.float(), weight.float(), bias.float()))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("inner, k", [(18944, 3584), (1408, 2048), (500, 1416)])
@pytest.mark.parametrize("num_rows", ROWS)
def test_gated_is_near_float32(num_rows: int, inner: int, k: int, activation: str) -> None:
    from vllm._custom_ops.triton import linear

    x, weight, _ = make(num_rows, 2 * inner, k, torch.bfloat16)
    out = torch.full((num_rows, inner), float("nan"), dtype=x.dtype, device="cuda")
    linear.skinny_gated_linear(out, x, weight, None, activation)
    gate, up = F.linear(x.float(), weight.float()).to(x.dtype).float().chunk(2, dim=-1)
    if activation == "silu":
        acted = F.silu(gate)
    else:
        acted = F.gelu(gate, approximate="none" if activation == "gelu" else "tanh")
    assert_rounded(out, acted * up)


@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_replays_are_the_same_bits(num_rows: int) -> None:
    """Parts of K arrive in any order; their sum does not know it."""
    from vllm._custom_ops.triton import arrival, linear

    x, weight, bias = make(num_rows, 3584, 3584, torch.bfloat16)
    plain = torch.empty(num_rows, 3584, dtype=x.dtype, device="cuda")
    gated = torch.empty(num_rows, 1792, dtype=x.dtype, device="cuda")

    def run() -> None:
        linear.skinny_linear(plain, x, weight, bias)
        linear.skinny_gated_linear(gated, x, weight, bias, "silu")

    run()
    expected = plain.clone(), gated.clone()
    graph = capture(run)
    for _ in range(200):
        plain.fill_(float("nan"))
        gated.fill_(float("nan"))
        graph.replay()
        assert torch.equal(plain, expected[0])
        assert torch.equal(gated, expected[1])
    assert arrival.get_counters(x.device).abs().sum() == 0
