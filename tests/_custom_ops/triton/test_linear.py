"""Products of few rows against their twins: forms, splits of K, odd sizes, activations."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.utils.ops import assert_near, poisoned, random_rows
from vllm._custom_ops.naive import linear as naive
from vllm._custom_ops.triton import arrival, linear, linear_table
from vllm._custom_ops.triton.device import count_processors
from vllm._custom_ops.triton.linear_table import SkinnyConfig
from vllm._custom_ops.triton.stream_table import MAX_PARTS
from vllm.errors import ShapeError

DOT = SkinnyConfig(block_n=32, block_k=32, num_stages=2, programs_per_sm=1)
SWAPPED = replace(DOT, block_n=64, is_swapped=True)
VECTOR = replace(DOT, block_n=8, is_vector=True)
QWEN2 = ((4608, 3584), (3584, 3584), (3584, 18944))
DTYPES = (torch.float32, torch.float16)


def make(
    num_rows: int, n: int, k: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    x = random_rows(num_rows, k, dtype=dtype, seed=1)
    weight = random_rows(n, k, dtype=dtype, seed=2, scale=k**-0.5)
    bias = random_rows(n, dtype=dtype, seed=3)
    return x.to(device), weight.to(device), bias.to(device)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[expected.dtype]
    # Roundings of gate, up and result may fall the other way; the interpreter cuts bfloat16 off.
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance / 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "num_rows, config",
    [(1, VECTOR), (1, DOT), (3, DOT), (16, SWAPPED), (33, DOT)],
    ids=lambda v: v if isinstance(v, int) else "v" if v.is_vector else "s" if v.is_swapped else "d",
)
@pytest.mark.parametrize("n, k", [(64, 96), (37, 72)])
def test_forms_equal_twin(
    device: str, dtype: torch.dtype, num_rows: int, config: SkinnyConfig, n: int, k: int
) -> None:
    x, weight, bias = make(num_rows, n, k, dtype, device)
    for programs in (1, 4):  # whole K, and parts of it
        config = replace(config, programs_per_sm=programs)
        out = poisoned((num_rows, n), dtype).to(device)
        expected = torch.empty_like(out)
        linear.launch_skinny(out, x, weight, bias, "", config)
        naive.skinny_linear(expected, x, weight, bias)
        assert_close(out, expected)
        assert arrival.get_counters(x.device).abs().sum() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", linear.GATED_ACTIVATIONS)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_gated_equals_twin(device: str, dtype: torch.dtype, activation: str, num_rows: int) -> None:
    x, weight, bias = make(num_rows, 2 * 37, 72, dtype, device)
    for config in (DOT, SWAPPED, VECTOR) if num_rows == 1 else (DOT, SWAPPED):
        for programs in (1, 4):
            out = poisoned((num_rows, 37), dtype).to(device)
            expected = torch.empty_like(out)
            form = replace(config, programs_per_sm=programs)
            linear.launch_skinny(out, x, weight, bias, activation, form)
            naive.skinny_gated_linear(expected, x, weight, bias, activation)
            assert_close(out, expected)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 64])
def test_ops_choose_a_form(device: str, num_rows: int) -> None:
    x, weight, _ = make(num_rows, 70, 136, torch.bfloat16, device)
    out = poisoned((num_rows, 70), torch.float32).to(device)
    expected = torch.empty_like(out)
    linear.skinny_linear(out, x, weight)
    naive.skinny_linear(expected, x, weight)
    assert torch.equal(out, out.bfloat16().float())  # rounded all the same
    assert_close(out.bfloat16(), expected.bfloat16())
    gated = poisoned((num_rows, 35), torch.bfloat16).to(device)
    expected = torch.empty_like(gated)
    linear.skinny_gated_linear(gated, x, weight, None, "silu")
    naive.skinny_gated_linear(expected, x, weight, None, "silu")
    assert_close(gated, expected)


@pytest.mark.parametrize("config", [DOT, SWAPPED, VECTOR])
def test_relu2_equals_twin(device: str, config: SkinnyConfig) -> None:
    x, weight, bias = make(1, 37, 72, torch.float16, device)
    for programs in (1, 4):
        out = poisoned((1, 37), torch.float16).to(device)
        form = replace(config, programs_per_sm=programs)
        linear.launch_skinny(out, x, weight, bias, linear.RELU2, form)
        expected = torch.empty_like(out)
        naive.skinny_relu2_linear(expected, x, weight, bias)
        assert_close(out, expected)
    linear.skinny_relu2_linear(out, x, weight, bias)
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows, config", [(1, VECTOR), (3, DOT), (16, SWAPPED)])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_parts_add_up(
    device: str, dtype: torch.dtype, num_rows: int, config: SkinnyConfig, num_parts: int
) -> None:
    x, weight, _ = make(num_rows, 37, 104, dtype, device)
    parts = poisoned((num_parts, num_rows, 37), torch.float32).to(device)
    linear.launch_parts(parts, x, weight, config)
    expected = torch.empty_like(parts)
    naive.skinny_linear_parts(expected, x, weight)
    assert_near(parts.sum(0), expected.sum(0))


def test_added_parts_have_the_bits_of_the_product(device: str) -> None:
    x, weight, _ = make(3, 37, 96, torch.bfloat16, device)
    form = replace(DOT, programs_per_sm=4)
    num_parts, _ = linear_table.count_splits(form, 37, 96, count_processors(x.device))
    assert num_parts > 1
    parts = poisoned((num_parts, 3, 37), torch.float32).to(device)
    out = poisoned((3, 37), torch.bfloat16).to(device)
    linear.launch_parts(parts, x, weight, form)
    linear.launch_skinny(out, x, weight, None, "", form)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert torch.equal(total.bfloat16(), out)


def test_the_op_leaves_parts(device: str) -> None:
    x, weight, _ = make(3, 40, 136, torch.bfloat16, device)
    parts = poisoned((2, 3, 40), torch.float32).to(device)
    linear.skinny_linear_parts(parts, x, weight)
    assert_near(parts.sum(0), x.float() @ weight.float().T)
    linear.skinny_linear_parts(parts[:, :0].contiguous(), x[:0], weight)
    with pytest.raises(ShapeError, match="parts are"):
        linear.skinny_linear_parts(parts.half(), x, weight)
    with pytest.raises(ShapeError, match="contiguous"):
        linear.skinny_linear_parts(parts[:, :2], x[:2], weight)


def test_strided_rows_beside_numbers_that_are_none(device: str) -> None:
    x, weight, bias = make(3, 40, 64, torch.float32, device)
    wide = torch.full((6, 200), float("nan"), device=device)
    wide[:3, 8:72] = x
    out = torch.full((6, 100), float("nan"), device=device)
    linear.skinny_linear(out[:3, 4:44], wide[:3, 8:72], weight, bias)
    expected = torch.empty(3, 40, device=device)
    naive.skinny_linear(expected, x, weight, bias)
    assert_near(out[:3, 4:44], expected)
    out[:3, 4:44] = float("nan")
    assert out.isnan().all()


def test_no_rows(device: str) -> None:
    _, weight, _ = make(1, 8, 16, torch.float32, device)
    linear.skinny_linear(weight.new_empty(0, 8), weight.new_empty(0, 16), weight)
    linear.skinny_gated_linear(
        weight.new_empty(0, 4), weight.new_empty(0, 16), weight, None, "silu"
    )


@pytest.mark.parametrize("n", [8, 3584, 4608, 18944, 152064])
@pytest.mark.parametrize("k", [64, 3584, 18944])
@pytest.mark.parametrize("num_rows", [1, 2, 16, 64])
def test_every_part_of_k_has_work(n: int, k: int, num_rows: int) -> None:
    for is_gated, is_hopper in itertools.product((False, True), repeat=2):
        config = linear_table.choose_config(
            num_rows, n, k, is_gated=is_gated, has_warp_groups=is_hopper
        )
        assert not config.is_vector or num_rows == 1
        splits, blocks = linear_table.count_splits(config, n, k, 132)
        assert splits >= 1
        assert (splits - 1) * blocks * config.block_k < k <= splits * blocks * config.block_k


@pytest.mark.parametrize("num_rows", [16, 32, 64])
def test_before_hopper_two_gated_programs_find_room(num_rows: int) -> None:
    shared_bytes = 163 << 10  # A100
    config = linear_table.choose_config(num_rows, 18944, 3584, is_gated=True, has_warp_groups=False)
    tile_bytes = 2 * config.block_k * (num_rows + 2 * config.block_n)
    assert 2 * config.num_stages * tile_bytes < shared_bytes


def test_other_shapes_are_torchs() -> None:
    assert linear_table.is_skinny(1, 3584, 3584)
    assert linear_table.is_skinny(1, 152064, 3584)
    assert linear_table.is_skinny(64, 18944, 3584, is_gated=True)
    assert linear_table.is_skinny(16, 4608, 3584)
    assert not linear_table.is_skinny(17, 4608, 3584)
    assert not linear_table.is_skinny(1, 9216, 2048)
    assert not linear_table.is_skinny(16, 2816, 2048, is_gated=True)
    assert not linear_table.is_skinny(64, 2816, 2048, is_gated=True)
    assert not linear_table.is_skinny(64, 3584, 3584)
    assert not linear_table.is_skinny(0, 3584, 3584)
    assert not linear_table.is_skinny(65, 18944, 3584, is_gated=True)
    assert not linear_table.is_skinny(1, 1 << 20, 3584)
    assert not linear_table.is_skinny(1, 3584, 3588)


def test_where_products_leave_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)

    def count(num_rows: int, n: int, k: int) -> int:
        return linear_table.count_parts(num_rows, n, k, gpu)

    assert linear_table.count_parts(1, 3584, 3584, torch.device("cpu")) == 0
    monkeypatch.setattr(linear_table, "count_processors", lambda device: 132)
    monkeypatch.setattr(linear_table, "has_warp_group_products", lambda device: True)
    assert [count(16, *nk) for nk in QWEN2] == [7, 8, 9]
    assert [count(32, *nk) for nk in QWEN2] == [3, 4, 9]
    assert [count(64, *nk) for nk in QWEN2] == [3, 4, 4]
    assert count(64, 4096, 14336) == 2
    assert count(0, 3584, 3584) == count(65, 3584, 3584) == 0
    assert count(64, 18560, 4096) == 0, "more tiles than processors"
    assert count(64, 4096, 4096) == 0, "torch is faster"
    assert count(16, 4096, 14336) == 4, "the processors are full of tiles as they are"
    monkeypatch.setattr(linear_table, "count_processors", lambda device: 108)
    monkeypatch.setattr(linear_table, "has_warp_group_products", lambda device: False)
    assert [count(16, *nk) for nk in QWEN2] == [3, 3, 3]
    assert [count(64, *nk) for nk in QWEN2] == [0, 0, 0]
    assert count(16, 1280, 3584) == MAX_PARTS, "more would be added up by a launch of its own"


def test_bad_arguments_name_what_was_given(device: str) -> None:
    x, weight, bias = make(3, 8, 16, torch.float32, device)
    out = x.new_empty(3, 8)
    with pytest.raises(ShapeError, match="has 65 rows, allowed: up to 64"):
        linear.skinny_linear(x.new_empty(65, 8), x.new_empty(65, 16), weight)
    with pytest.raises(ShapeError, match="do not fit"):
        linear.skinny_linear(out[:2], x, weight)
    with pytest.raises(ShapeError, match="contiguous"):
        linear.skinny_linear(x.new_empty(3, 16), x[:, :8].contiguous(), weight.T)
    with pytest.raises(ShapeError, match=r"bias is torch.float32 \[7\]"):
        linear.skinny_linear(out, x, weight, bias[:7])
    with pytest.raises(ShapeError, match="weight is torch"):
        linear.skinny_linear(out, x, weight.bfloat16())
    with pytest.raises(ShapeError, match="activation is 'relu'"):
        linear.skinny_gated_linear(out[:, :4], x, weight, None, "relu")
