"""The norm ops against their twins: sizes, strides, rounding, the bit rule, bad arguments."""

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
from vllm._custom_ops import norm
from vllm._custom_ops.naive import norm as naive
from vllm.errors import ShapeError

SIZES = (1, 7, 8, 16, 33, 64, 576, 1027)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("float_weight", [False, True])
def test_rms_norm_equals_twin(isa: str, dtype: torch.dtype, size: int, float_weight: bool) -> None:
    x = random_rows(5, size, dtype=dtype, seed=size, scale=3.0)
    weight = random_rows(size, dtype=torch.float32 if float_weight else dtype, seed=1)
    actual, expected = poisoned(x.shape, dtype), torch.empty_like(x)
    norm.rms_norm(actual, x, weight, 1e-5)
    naive.rms_norm(expected, x, weight, 1e-5)
    assert_near(actual, expected)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_fused_add_rms_norm_equals_twin(isa: str, dtype: torch.dtype, size: int) -> None:
    x, residual = (random_rows(4, size, dtype=dtype, seed=s) for s in (2, 3))
    weight = random_rows(size, dtype=dtype, seed=4)
    x_naive, residual_naive = x.clone(), residual.clone()
    norm.fused_add_rms_norm(x, residual, weight, 1e-6)
    naive.fused_add_rms_norm(x_naive, residual_naive, weight, 1e-6)
    assert torch.equal(residual, residual_naive)
    assert_near(x, x_naive)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("num_parts", [1, 2, 9, 12])
def test_twin_of_parts_is_the_sum_rounded_then_added(dtype: torch.dtype, num_parts: int) -> None:
    """The op exists on CUDA only."""
    parts = random_rows(num_parts, 4, 33, dtype=torch.float32, seed=2)
    residual, weight = random_rows(4, 33, dtype=dtype, seed=3), random_rows(33, dtype=dtype, seed=4)
    expected, expected_residual = parts.double().sum(0).to(dtype), residual.clone()
    norm.fused_add_rms_norm(expected, expected_residual, weight, 1e-6)
    out = poisoned(residual.shape, dtype)
    naive.add_parts_rms_norm(out, parts, residual, weight, 1e-6)
    assert_near(residual, expected_residual)
    assert_near(out, expected)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_rms_norm_takes_strided_heads_and_works_in_place(dtype: torch.dtype) -> None:
    qkv = random_rows(6, 10 * 24, dtype=dtype, seed=5)
    weight = random_rows(24, dtype=dtype, seed=6)
    before = qkv.clone()
    heads = qkv[:, : 4 * 24].unflatten(-1, (4, 24))
    expected = torch.empty_like(heads)
    naive.rms_norm(expected, heads, weight, 1e-6)
    norm.rms_norm(heads, heads, weight, 1e-6)
    assert_near(heads, expected)
    assert torch.equal(qkv[:, 4 * 24 :], before[:, 4 * 24 :])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_rows_stand_alone(isa: str, dtype: torch.dtype) -> None:
    x = random_rows(300, 576, dtype=dtype, seed=7)
    weight = random_rows(576, dtype=dtype, seed=8)

    def run(rows: list[int]) -> torch.Tensor:
        picked, residual = x[rows], x[rows].flip(-1)
        norm.fused_add_rms_norm(picked, residual, weight, 1e-5)
        return torch.cat((picked, residual), -1)

    assert_rows_stand_alone(run, 300)


def test_no_rows() -> None:
    x = torch.empty(0, 8)
    norm.rms_norm(torch.empty(0, 8), x, torch.ones(8), 1e-6)
    norm.fused_add_rms_norm(x, torch.empty(0, 8), torch.ones(8), 1e-6)


def test_bad_arguments_name_what_was_given() -> None:
    x, weight = torch.randn(2, 8), torch.ones(8)
    with pytest.raises(ShapeError, match=r"rms_norm: out .*expected \[2, 8\]"):
        norm.rms_norm(torch.empty(2, 9), x, weight, 1e-6)
    with pytest.raises(ShapeError, match="weight"):
        norm.rms_norm(torch.empty(2, 8), x, torch.ones(9), 1e-6)
    with pytest.raises(ShapeError, match="Half"):
        norm.rms_norm(torch.empty(2, 8).half(), x.half(), weight.half(), 1e-6)
    with pytest.raises(ShapeError, match="contiguous in its last dimension"):
        norm.rms_norm(torch.empty(8, 2).T, torch.randn(8, 2).T, weight, 1e-6)
    with pytest.raises(ShapeError, match="weight is BFloat16, expected Float"):
        norm.rms_norm(torch.empty(2, 8), x, weight.bfloat16(), 1e-6)
    with pytest.raises(ShapeError, match="residual"):
        norm.fused_add_rms_norm(x, torch.randn(3, 8), weight, 1e-6)
    with pytest.raises(ShapeError, match="rank 1 to 3"):
        norm.rms_norm(torch.empty(1, 1, 2, 8), torch.empty(1, 1, 2, 8), weight, 1e-6)
