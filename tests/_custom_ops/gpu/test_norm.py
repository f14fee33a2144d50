"""The norm ops on a GPU against their twins: row lengths, strides, the bit rule, graphs, errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests._custom_ops.gpu.graphs import capture
from tests._custom_ops.gpu.tensors import (
    DTYPES,
    NEEDS_GPU,
    TOLERANCE,
    assert_near,
    draw,
    poisoned_like,
)
from vllm._custom_ops import norm as ops
from vllm._custom_ops.naive import linear as naive_linear
from vllm._custom_ops.naive import norm as naive
from vllm.errors import ShapeError

pytestmark = NEEDS_GPU
SIZES = (1, 7, 64, 80, 128, 256, 257, 500, 1000, 2048, 2880, 4096, 4100, 8192, 16384)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_weight_float", [False, True])
def test_rms_norm_equals_twin(dtype: torch.dtype, size: int, is_weight_float: bool) -> None:
    x = draw(5, size, dtype=dtype, seed=1)
    weight = draw(size, dtype=torch.float32 if is_weight_float else dtype, seed=2)
    out, expected = poisoned_like(x), poisoned_like(x)
    ops.rms_norm(out, x, weight, 1e-6)
    naive.rms_norm(expected, x, weight, 1e-6)
    assert_near(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_fused_add_rms_norm_equals_twin(dtype: torch.dtype, size: int) -> None:
    x, residual = draw(3, size, dtype=dtype, seed=1), draw(3, size, dtype=dtype, seed=2)
    weight = draw(size, dtype=dtype, seed=3)
    x_naive, residual_naive = x.clone(), residual.clone()
    ops.fused_add_rms_norm(x, residual, weight, 1e-5)
    naive.fused_add_rms_norm(x_naive, residual_naive, weight, 1e-5)
    assert torch.equal(residual, residual_naive)
    assert_near(x, x_naive)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_weight_float", [False, True])
def test_norm_add_rms_norm_equals_twin(
    dtype: torch.dtype, size: int, is_weight_float: bool
) -> None:
    x, residual = draw(3, size, dtype=dtype, seed=1), draw(3, size, dtype=dtype, seed=2)
    weight_dtype = torch.float32 if is_weight_float else dtype
    first, second = (draw(size, dtype=weight_dtype, seed=seed) for seed in (3, 4))
    x_naive, residual_naive = x.clone(), residual.clone()
    ops.norm_add_rms_norm(x, residual, first, second, 1e-5)
    naive.norm_add_rms_norm(x_naive, residual_naive, first, second, 1e-5)
    # A norm rounded the other way moves a sum by a step of its larger part.
    step = TOLERANCE[dtype][0] * residual_naive.abs().max().item()
    torch.testing.assert_close(residual, residual_naive, rtol=0, atol=step)
    step = TOLERANCE[dtype][0] * x_naive.abs().max().item()
    torch.testing.assert_close(x, x_naive, rtol=0, atol=step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2048, 2880, 3584, 8192])
def test_norm_add_rms_norm_equals_separate_ops(dtype: torch.dtype, size: int) -> None:
    x, residual = draw(3, size, dtype=dtype, seed=1), draw(3, size, dtype=dtype, seed=2)
    first, second = (draw(size, dtype=torch.float32, seed=seed) for seed in (3, 4))
    x_parts, residual_parts = x.clone(), residual.clone()
    ops.norm_add_rms_norm(x, residual, first, second, 1e-5)
    ops.rms_norm(x_parts, x_parts, first, 1e-5)
    ops.fused_add_rms_norm(x_parts, residual_parts, second, 1e-5)
    assert torch.equal(residual, residual_parts)
    assert torch.equal(x, x_parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 128, 96, 12])
def test_heads_inside_qkv_are_normed_in_place(dtype: torch.dtype, head_size: int) -> None:
    qkv = draw(9, 7, head_size, dtype=dtype, seed=4)
    expected = qkv.clone()
    weight = draw(head_size, dtype=dtype, seed=5)
    ops.rms_norm(qkv[:, 1:4], qkv[:, 1:4], weight, 1e-6)
    naive.rms_norm(expected[:, 1:4], expected[:, 1:4], weight, 1e-6)
    assert_near(qkv, expected)
    assert torch.equal(qkv[:, 4:], expected[:, 4:])


@pytest.mark.parametrize("size", [64, 128, 2048, 3584, 4096, 8192, 16384])
def test_rows_stand_alone(size: int) -> None:
    x = draw(300, size, dtype=torch.bfloat16, seed=6)
    weight = draw(size, dtype=torch.bfloat16, seed=7)
    whole, alone = torch.empty_like(x), torch.empty_like(x[:1])
    ops.rms_norm(whole, x, weight, 1e-6)
    for row in (0, 17, 299):
        ops.rms_norm(alone, x[row : row + 1], weight, 1e-6)
        assert torch.equal(alone[0], whole[row])


def test_graph_replays_equal() -> None:
    x, residual = (draw(16, 4096, dtype=torch.bfloat16, seed=seed) for seed in (8, 9))
    weight = draw(4096, dtype=torch.bfloat16, seed=10)
    x_static, residual_static = x.clone(), residual.clone()
    graph = capture(lambda: ops.fused_add_rms_norm(x_static, residual_static, weight, 1e-6))
    x_static.copy_(x)
    residual_static.copy_(residual)
    graph.replay()
    ops.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(x_static, x)
    assert torch.equal(residual_static, residual)


def norm_whole(parts: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normed sum and the residual stream of a product that is added up first."""
    product, total = naive_linear.sum_parts(parts).to(residual.dtype), residual.clone()
    ops.fused_add_rms_norm(product, total, weight, 1e-6)
    return product, total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [80, 256, 1000, 1280, 2048, 2880, 3584, 4096, 8192])
@pytest.mark.parametrize("num_parts", [*range(1, 10), 12])
@pytest.mark.parametrize("is_weight_float", [False, True])
def test_parts_equal_their_rounded_sum(
    dtype: torch.dtype, size: int, num_parts: int, is_weight_float: bool
) -> None:
    parts = draw(num_parts, 5, size, dtype=torch.float32, seed=1)
    residual = draw(5, size, dtype=dtype, seed=2)
    weight = draw(size, dtype=torch.float32 if is_weight_float else dtype, seed=3)
    expected, expected_residual = norm_whole(parts, residual, weight)
    out = poisoned_like(residual)
    ops.add_parts_rms_norm(out, parts, residual, weight, 1e-6)
    assert torch.equal(residual, expected_residual)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("num_rows", [1, 4, 5, 9, 17, 33, 64, 65])
@pytest.mark.parametrize("size", [1280, 3584, 4096])
@pytest.mark.parametrize("is_strided", [False, True])
def test_parts_of_any_number_of_rows(num_rows: int, size: int, is_strided: bool) -> None:
    """The fewer rows, the more blocks of a device share one."""
    dtype = torch.bfloat16
    parts = draw(7, num_rows, size, dtype=torch.float32, seed=1)
    residual = draw(num_rows, size + 8 * is_strided, dtype=dtype, seed=2)[:, :size]
    weight = draw(size, dtype=dtype, seed=3)
    twin, twin_residual = poisoned_like(residual), residual.clone()
    naive.add_parts_rms_norm(twin, parts, twin_residual, weight, 1e-6)
    expected, expected_residual = norm_whole(parts, residual, weight)
    out = poisoned_like(residual)
    ops.add_parts_rms_norm(out, parts, residual, weight, 1e-6)
    assert torch.equal(residual, twin_residual)
    assert torch.equal(residual, expected_residual)
    assert torch.equal(out, expected)
    # A norm rounded the other way moves a product by a step of its larger part.
    step = TOLERANCE[dtype][0] * twin.abs().max().item()
    torch.testing.assert_close(out, twin, rtol=0, atol=step)


def test_parts_replay_equal() -> None:
    parts = draw(9, 16, 4096, dtype=torch.float32, seed=1)
    residual, weight = (
        draw(16, 4096, dtype=torch.bfloat16, seed=2),
        draw(4096, dtype=torch.bfloat16),
    )
    out, residual_static = torch.empty_like(residual), residual.clone()
    graph = capture(lambda: ops.add_parts_rms_norm(out, parts, residual_static, weight, 1e-6))
    residual_static.copy_(residual)
    graph.replay()
    expected = torch.empty_like(residual)
    ops.add_parts_rms_norm(expected, parts, residual, weight, 1e-6)
    assert torch.equal(residual_static, residual)
    assert torch.equal(out, expected)


def test_bad_parts() -> None:
    parts = draw(2, 3, 256, dtype=torch.float32)
    residual, weight = draw(3, 256, dtype=torch.bfloat16), draw(256, dtype=torch.bfloat16)
    out = torch.empty_like(residual)
    ops.add_parts_rms_norm(out[:0], parts[:, :0].contiguous(), residual[:0], weight, 1e-6)
    with pytest.raises(ShapeError, match="dimension 1 must be 3"):
        ops.add_parts_rms_norm(out, parts[:, :2].contiguous(), residual, weight, 1e-6)
    with pytest.raises(ShapeError, match="parts is BFloat16, expected Float"):
        ops.add_parts_rms_norm(out, parts.bfloat16(), residual, weight, 1e-6)
    with pytest.raises(ShapeError, match="there must be a part"):
        ops.add_parts_rms_norm(out, parts[:0], residual, weight, 1e-6)


def test_no_rows_and_bad_arguments() -> None:
    x, weight = draw(2, 8, dtype=torch.float32), draw(8, dtype=torch.float32)
    ops.rms_norm(x[:0], x[:0], weight, 1e-6)
    with pytest.raises(ShapeError, match=r"weight has shape \[7\]"):
        ops.rms_norm(x, x, weight[:7], 1e-6)
    with pytest.raises(ShapeError, match="weight must be on a CUDA device"):
        ops.rms_norm(x, x, weight.cpu(), 1e-6)
    with pytest.raises(ShapeError, match="out is BFloat16, expected Float"):
        ops.rms_norm(x.bfloat16(), x, weight, 1e-6)
    with pytest.raises(ShapeError, match="contiguous in its last dimension"):
        ops.rms_norm(x, draw(8, 2, dtype=torch.float32).t(), weight, 1e-6)
