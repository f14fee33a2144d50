"""The activation ops against their twins: sizes, strides, extremes, the bit rule, bad arguments."""

from __future__ import annotations

import pytest
import torch

from tests.utils.ops import (
    FLOAT_DTYPES,
    assert_near,
    assert_rows_stand_alone,
    poisoned,
    random_rows,
)
from vllm._custom_ops import activation
from vllm._custom_ops.naive import activation as naive
from vllm.errors import ShapeError

GATED = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
ELEMENTWISE = ("gelu_new", "gelu_fast", "gelu_quick")
SIZES = (1, 7, 16, 33, 1536)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", GATED)
def test_gated_equals_twin(isa: str, dtype: torch.dtype, size: int, op: str) -> None:
    x = random_rows(5, 2 * size, dtype=dtype, seed=size, scale=2.0)
    actual, expected = poisoned((5, size), dtype), torch.empty(5, size, dtype=dtype)
    getattr(activation, op)(actual, x)
    getattr(naive, op)(expected, x)
    assert_near(actual, expected)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_elementwise_equals_twin(isa: str, dtype: torch.dtype, size: int, op: str) -> None:
    x = random_rows(2, 3, size, dtype=dtype, seed=size, scale=4.0)
    actual, expected = poisoned(x.shape, dtype), torch.empty_like(x)
    getattr(activation, op)(actual, x)
    getattr(naive, op)(expected, x)
    assert_near(actual, expected)
    getattr(activation, op)(x, x)
    assert torch.equal(actual, x)


@pytest.mark.parametrize("op", GATED)
def test_gated_over_the_whole_range(isa: str, op: str) -> None:
    gate = torch.linspace(-120, 120, 4801)
    gate = torch.cat((gate, torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e30, float("nan")])))
    x = torch.cat((gate, torch.ones_like(gate)))
    actual, expected = poisoned(gate.shape, torch.float32), torch.empty_like(gate)
    getattr(activation, op)(actual, x)
    getattr(naive, op)(expected, x)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_rows_stand_alone(isa: str, dtype: torch.dtype) -> None:
    x = random_rows(120, 2 * 200, dtype=dtype, seed=9)

    def run(rows: list[int]) -> torch.Tensor:
        out = poisoned((len(rows), 200), dtype)
        activation.silu_and_mul(out, x[rows])
        return out

    assert_rows_stand_alone(run, 120)


def test_strided_rows() -> None:
    wide = random_rows(6, 64, dtype=torch.float32, seed=10)
    out = poisoned((6, 32), torch.float32)
    activation.silu_and_mul(out[:, :16], wide[:, 8:40])
    expected = torch.empty(6, 16)
    naive.silu_and_mul(expected, wide[:, 8:40])
    assert_near(out[:, :16], expected)
    assert out[:, 16:].isnan().all()


def test_bad_arguments_name_what_was_given() -> None:
    with pytest.raises(ShapeError, match="half the last size"):
        activation.silu_and_mul(torch.empty(2, 5), torch.empty(2, 8))
    with pytest.raises(ShapeError, match="half the last size"):
        activation.silu_and_mul(torch.empty(8, 4), torch.empty(4, 2, 8))
    with pytest.raises(ShapeError, match="out is BFloat16, expected Float"):
        activation.gelu_and_mul(torch.empty(2, 4).bfloat16(), torch.empty(2, 8))
    with pytest.raises(ShapeError, match="allowed: Float, BFloat16"):
        activation.gelu_new(torch.empty(2, 8).double(), torch.empty(2, 8).double())
    with pytest.raises(ShapeError, match=r"out has shape \[2, 7\], expected \[2, 8\]"):
        activation.gelu_quick(torch.empty(2, 7), torch.empty(2, 8))
