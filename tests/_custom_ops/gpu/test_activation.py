"""The activation ops on a GPU against their twins: odd sizes, strides, graphs, errors."""

from __future__ import annotations

import pytest
import torch

from tests._custom_ops.gpu.graphs import capture
from tests._custom_ops.gpu.tensors import (
    DTYPES,
    NEEDS_GPU,
    TOLERANCE,
    assert_near,
    draw,
    poisoned_like,
)
from vllm._custom_ops import activation as ops
from vllm._custom_ops.naive import activation as naive
from vllm.errors import ShapeError

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 8, 100, 129, 1408, 14336])
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_gated_equals_twin(dtype: torch.dtype, size: int, name: str) -> None:
    x = draw(5, 2 * size, dtype=dtype, seed=1, scale=3.0)
    out, expected = poisoned_like(x[:, :size]), poisoned_like(x[:, :size])
    getattr(ops, name)(out, x)
    getattr(naive, name)(expected, x)
    assert_near(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3,), (7, 33), (2, 3, 64)])
@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "gelu_quick", "relu2"])
def test_plain_equals_twin(dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    x = draw(*shape, dtype=dtype, seed=2, scale=3.0)
    out, expected = poisoned_like(x), poisoned_like(x)
    getattr(ops, name)(out, x)
    getattr(naive, name)(expected, x)
    assert_near(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 1000, 9472, 9473])
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_many_rows_equal_few(dtype: torch.dtype, size: int, name: str) -> None:
    x = draw(700, 2 * size, dtype=dtype, seed=11, scale=3.0)
    out, alone = poisoned_like(x[:, :size]), poisoned_like(x[:3, :size])
    getattr(ops, name)(out, x)
    for first in (0, 350, 697):
        getattr(ops, name)(alone, x[first : first + 3])
        assert torch.equal(out[first : first + 3], alone)
    assert not out.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_relu2_squares_in_place_and_keeps_nan(dtype: torch.dtype) -> None:
    x = draw(9, 21504, dtype=dtype, seed=12)
    x[0, 0] = float("nan")
    expected = torch.relu(x).square()
    ops.relu2(x, x)
    assert x[0, 0].isnan()
    assert torch.equal(x.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1000, 1001])
def test_soft_cap_of_cut_columns_equals_twin(dtype: torch.dtype, width: int) -> None:
    logits = draw(4, 1024, dtype=dtype, seed=3, scale=40.0)
    expected = logits.clone()
    ops.soft_cap(logits[:, :width], 0.5, 30.0)
    naive.soft_cap(expected[:, :width], 0.5, 30.0)
    assert_near(logits, expected)
    assert torch.equal(logits[:, width:], expected[:, width:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [128, 100, 7])
def test_mul_sigmoid_equals_twin(dtype: torch.dtype, size: int) -> None:
    x = draw(5, size, dtype=dtype, seed=6)
    gate = draw(5, 3 * size, dtype=dtype, seed=7, scale=3.0)[:, :size]
    expected = x.clone()
    ops.mul_sigmoid(x, gate)
    naive.mul_sigmoid(expected, gate)
    assert_near(x, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2048, 100, 7])
def test_add_gated_equals_twin(dtype: torch.dtype, size: int) -> None:
    out, x = draw(5, size, dtype=dtype, seed=8), draw(5, size, dtype=dtype, seed=9)
    gate = draw(5, 1, dtype=dtype, seed=10)
    expected = out.clone()
    ops.add_gated(out, x, gate)
    naive.add_gated(expected, x, gate)
    step = TOLERANCE[dtype][0] * expected.abs().max().item()
    torch.testing.assert_close(out, expected, rtol=0, atol=step)


def test_rows_may_lie_apart() -> None:
    x = draw(6, 3, 64, dtype=torch.bfloat16, seed=4)
    out, expected = poisoned_like(x[:, 1, :32]), poisoned_like(x[:, 1, :32])
    ops.silu_and_mul(out, x[:, 1])
    naive.silu_and_mul(expected, x[:, 1])
    assert_near(out, expected)


def test_graph_replays_equal() -> None:
    x = draw(3, 2 * 1408, dtype=torch.bfloat16, seed=5)
    out, expected = poisoned_like(x[:, :1408]), poisoned_like(x[:, :1408])
    graph = capture(lambda: ops.silu_and_mul(out, x))
    out.fill_(float("nan"))
    graph.replay()
    ops.silu_and_mul(expected, x)
    assert torch.equal(out, expected)


def test_no_rows_and_bad_arguments() -> None:
    x = draw(2, 8, dtype=torch.float32)
    ops.silu_and_mul(x[:0, :4], x[:0])
    with pytest.raises(ShapeError, match="with half the last size"):
        ops.silu_and_mul(x, x)
    with pytest.raises(ShapeError, match="out must be on CUDA device 0"):
        ops.silu_and_mul(x[:, :4].cpu(), x)
    with pytest.raises(ShapeError, match="allowed: Float, BFloat16, Half"):
        ops.gelu_new(x.double(), x.double())
    with pytest.raises(ShapeError, match="must be positive"):
        ops.soft_cap(x, 1.0, 0.0)
