"""The soft cap against its twin: sizes, strides, range, the bit rule, bad arguments."""

from __future__ import annotations

import pytest
import torch

from tests.utils.ops import FLOAT_DTYPES, assert_near, assert_rows_stand_alone, random_rows
from vllm._custom_ops import activation
from vllm._custom_ops.naive import activation as naive
from vllm.errors import ShapeError


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 33, 4096, 9001])
def test_equals_twin(isa: str, dtype: torch.dtype, size: int) -> None:
    wide = random_rows(3, size + 5, dtype=dtype, seed=size, scale=40.0)
    actual, expected = wide.clone(), wide.clone()
    activation.soft_cap(actual[:, 2 : 2 + size], 0.5, 30.0)
    naive.soft_cap(expected[:, 2 : 2 + size], 0.5, 30.0)
    assert_near(actual, expected)


def test_extremes_meet_the_cap() -> None:
    x = torch.tensor([[float("-inf"), -1e30, 0.0, 1e30, float("inf")]])
    activation.soft_cap(x, 1.0, 5.0)
    assert x.tolist() == [[-5.0, -5.0, 0.0, 5.0, 5.0]]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_nan_stays_nan(isa: str, dtype: torch.dtype) -> None:
    x = random_rows(2, 37, dtype=dtype, seed=5)
    x[1, 3] = x[1, 36] = float("nan")
    expected = x.isnan()
    activation.soft_cap(x, 0.5, 30.0)
    assert torch.equal(x.isnan(), expected)


def test_rows_stand_alone(isa: str) -> None:
    x = random_rows(40, 5003, dtype=torch.float32, seed=1, scale=30.0)

    def run(rows: list[int]) -> torch.Tensor:
        picked = x[rows]
        activation.soft_cap(picked, 1.0, 30.0)
        return picked

    assert_rows_stand_alone(run, 40)


def test_bad_arguments_name_what_was_given() -> None:
    with pytest.raises(ShapeError, match="cap is 0"):
        activation.soft_cap(torch.ones(2, 3), 1.0, 0.0)
    with pytest.raises(ShapeError, match="Half"):
        activation.soft_cap(torch.ones(2, 3).half(), 1.0, 1.0)
    with pytest.raises(ShapeError, match="rank 2"):
        activation.soft_cap(torch.ones(3), 1.0, 1.0)
    activation.soft_cap(torch.ones(0, 3), 1.0, 1.0)
