"""The linear ops against their twins: layout, odd sizes, the bit rule, bad arguments."""

from __future__ import annotations

import pytest
import torch

from tests.utils.ops import FLOAT_DTYPES, assert_rows_stand_alone, poisoned, random_rows
from vllm._custom_ops import linear as ops
from vllm._custom_ops.naive import linear as naive
from vllm.errors import ShapeError

SHAPES = ((1, 1), (5, 7), (32, 64), (33, 31), (70, 576), (96, 129), (200, 2048))


def assert_product_near(actual: torch.Tensor, expected: torch.Tensor, x: torch.Tensor) -> None:
    """Compare products whose float32 sums run in different orders.

    bfloat16 results may fall to either side of one rounding step (2**-8 relative); the float32
    error of a sum of k terms grows with its absolute size, about sqrt(k) here.
    """
    rtol = 2**-7 if x.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=2e-6 * x.shape[1] ** 0.5)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_pack_equals_twin_and_unpacks(isa: str, dtype: torch.dtype, n: int, k: int) -> None:
    weight = random_rows(n, k, dtype=dtype, seed=n)
    packed = ops.pack_linear_weight(weight)
    assert packed.shape == ops.packed_shape(n, k, dtype)
    assert torch.equal(packed, naive.pack_linear_weight(weight))
    assert torch.equal(ops.unpack_linear_weight(packed, n, k), weight)


def test_pack_takes_rows_of_a_larger_weight_and_given_memory() -> None:
    whole = random_rows(64, 48, dtype=torch.bfloat16, seed=1)
    stack = ops.empty_packed(40, 20, torch.bfloat16, count=2)
    packed = ops.pack_linear_weight(whole[5:45, 7:27], stack[1])
    assert packed.data_ptr() == stack[1].data_ptr()
    assert torch.equal(ops.unpack_linear_weight(packed, 40, 20), whole[5:45, 7:27])


def test_stacks_of_any_strides_are_packed_one_by_one() -> None:
    rows = random_rows(3 * 20, 40, dtype=torch.bfloat16, seed=2)
    stack = rows.view(3, 20, 40).transpose(1, 2)
    packed = ops.pack_weight_stack(stack)
    assert torch.equal(packed, naive.pack_weight_stack(stack))
    assert torch.equal(packed[2], ops.pack_linear_weight(stack[2].contiguous()))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 12, 13, 25, 200])
def test_linear_equals_twin(isa: str, dtype: torch.dtype, n: int, k: int, rows: int) -> None:
    packed = ops.pack_linear_weight(random_rows(n, k, dtype=dtype, seed=n, scale=k**-0.5))
    x = random_rows(rows, k, dtype=dtype, seed=rows)
    bias = random_rows(n, dtype=dtype, seed=2) if rows % 2 else None
    actual, expected = poisoned((rows, n), dtype), torch.empty(rows, n, dtype=dtype)
    ops.linear(actual, x, packed, bias)
    naive.linear(expected, x, packed, bias)
    assert_product_near(actual, expected, x)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_linear_takes_strided_rows(dtype: torch.dtype) -> None:
    packed = ops.pack_linear_weight(random_rows(40, 24, dtype=dtype, seed=3, scale=0.2))
    wide = random_rows(9, 60, dtype=dtype, seed=4)
    out = poisoned((9, 50), dtype)
    ops.linear(out[:, 4:44], wide[:, 11:35], packed)
    expected = torch.empty(9, 40, dtype=dtype)
    ops.linear(expected, wide[:, 11:35].contiguous(), packed)
    assert torch.equal(out[:, 4:44], expected)
    assert out[:, :4].isnan().all() and out[:, 44:].isnan().all()


def test_float_logits_are_the_rounded_ones() -> None:
    packed = ops.pack_linear_weight(random_rows(101, 64, dtype=torch.bfloat16, seed=5))
    x = random_rows(7, 64, dtype=torch.bfloat16, seed=6)
    narrow, wide = poisoned((7, 101), torch.bfloat16), poisoned((7, 101), torch.float32)
    ops.linear(narrow, x, packed)
    ops.linear(wide, x, packed)
    assert torch.equal(wide, narrow.float())


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("k", [575, 2048])
def test_rows_stand_alone(isa: str, dtype: torch.dtype, k: int) -> None:
    packed = ops.pack_linear_weight(random_rows(170, k, dtype=dtype, seed=7))
    bias = random_rows(170, dtype=dtype, seed=8)
    x = random_rows(203, k, dtype=dtype, seed=9)

    def run(rows: list[int]) -> torch.Tensor:
        out = poisoned((len(rows), 170), dtype)
        ops.linear(out, x[rows], packed, bias)
        return out

    assert_rows_stand_alone(run, 203)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("k", [5, 64, 576])
def test_embedding_equals_twin(isa: str, dtype: torch.dtype, k: int) -> None:
    weight = random_rows(77, k, dtype=dtype, seed=10)
    packed = ops.pack_linear_weight(weight)
    ids = torch.tensor([0, 76, 31, 32, 33, 0])
    out = poisoned((6, k), dtype)
    ops.embedding(out, ids, packed)
    assert torch.equal(out, weight[ids])


def test_no_rows() -> None:
    packed = ops.pack_linear_weight(torch.ones(8, 4))
    ops.linear(torch.empty(0, 8), torch.empty(0, 4), packed)
    ops.embedding(torch.empty(0, 4), torch.empty(0, dtype=torch.int64), packed)


def test_huge_memory_is_returned() -> None:
    first = ops.empty_packed(32, 64, torch.float32)
    first.fill_(7.0)
    second = ops.empty_packed(32, 64, torch.float32)
    second.fill_(8.0)
    kept = first[0, 0]
    del first, second
    large = ops.empty_packed(32 * 4096, 256, torch.float32)
    large[-1].fill_(1.0)
    del large
    assert kept.eq(7.0).all()


def test_large_outputs_lie_in_recycled_memory() -> None:
    first = ops.empty_output(300, 1000, torch.float32).fill_(1.0)
    second = ops.empty_output(300, 1000, torch.float32).fill_(2.0)
    assert first.eq(1.0).all() and second.eq(2.0).all()
    row, address = first[7], first.data_ptr()
    del first
    assert ops.empty_output(300, 1000, torch.float32).data_ptr() not in (address, second.data_ptr())
    assert row.eq(1.0).all()  # a view keeps the whole
    del row
    held = [ops.empty_output(300, 1000, torch.float32) for _ in range(3)]
    assert address in {tensor.data_ptr() for tensor in held}
    small = ops.empty_output(3, 5, torch.bfloat16)
    assert small.shape == (3, 5) and small.is_contiguous()


def test_bad_arguments_name_what_was_given() -> None:
    packed = ops.pack_linear_weight(torch.ones(40, 6))
    x, out = torch.ones(3, 6), torch.empty(3, 40)
    with pytest.raises(ShapeError, match="made for another K than 5"):
        ops.linear(out, torch.ones(3, 5), packed)
    with pytest.raises(ShapeError, match="2 blocks of 32"):
        ops.linear(torch.empty(3, 65), x, packed)
    with pytest.raises(ShapeError, match="packed is Float, expected BFloat16"):
        ops.linear(out.bfloat16(), x.bfloat16(), packed)
    with pytest.raises(ShapeError, match="bias"):
        ops.linear(out, x, packed, torch.ones(39))
    with pytest.raises(ShapeError, match="out has shape"):
        ops.linear(torch.empty(2, 40), x, packed)
    with pytest.raises(ShapeError, match="contiguous in its last dimension"):
        ops.linear(out, torch.ones(6, 3).T, packed)
    with pytest.raises(ShapeError, match="Half"):
        ops.pack_linear_weight(torch.ones(4, 4).half(), torch.empty(1, 2, 32, 2).half())
    with pytest.raises(ShapeError, match=r"ids\[1\] is 64"):
        ops.embedding(torch.empty(2, 6), torch.tensor([0, 64]), packed)
    with pytest.raises(ShapeError, match="weight"):
        ops.unpack_linear_weight(packed, 65, 6)
