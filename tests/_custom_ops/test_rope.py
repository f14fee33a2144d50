"""The rotary op against its twin: pairings, partial heads, strides, the bit rule, bad arguments."""

from __future__ import annotations

import pytest
import torch

from tests.utils.ops import FLOAT_DTYPES, assert_near, assert_rows_stand_alone, random_rows
from vllm._custom_ops import rope
from vllm._custom_ops.naive import rope as naive
from vllm.errors import ShapeError


def make_table(max_pos: int, rot_dim: int) -> torch.Tensor:
    """Return the usual table with base 10000."""
    inverse = 10000.0 ** (-torch.arange(0, rot_dim, 2) / rot_dim)
    angles = torch.arange(max_pos)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), -1)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("head_size, rot_dim", [(64, 64), (80, 32), (24, 24), (256, 128), (8, 2)])
@pytest.mark.parametrize("is_neox", [True, False])
def test_equals_twin(
    isa: str, dtype: torch.dtype, head_size: int, rot_dim: int, is_neox: bool
) -> None:
    table = make_table(100, rot_dim)
    positions = torch.tensor([0, 99, 5, 5, 42, 7, 1])
    query = random_rows(7, 3 * head_size, dtype=dtype, seed=1)
    key = random_rows(7, 2 * head_size, dtype=dtype, seed=2)
    query_naive, key_naive = query.clone(), key.clone()
    rope.rotary_embedding(positions, query, key, head_size, table, is_neox)
    naive.rotary_embedding(positions, query_naive, key_naive, head_size, table, is_neox)
    assert_near(query, query_naive)
    assert_near(key, key_naive)


def test_slices_of_qkv_are_turned_in_place_and_values_untouched() -> None:
    table = make_table(50, 16)
    qkv = random_rows(5, 8, 16, dtype=torch.float32, seed=3)
    before = qkv.clone()
    query, key = before[:, :4].clone(), before[:, 4:6].clone()
    positions = torch.arange(5)
    naive.rotary_embedding(positions, query, key, 16, table, True)
    rope.rotary_embedding(positions, qkv[:, :4], qkv[:, 4:6], 16, table, True)
    assert_near(qkv[:, :4], query)
    assert_near(qkv[:, 4:6], key)
    assert torch.equal(qkv[:, 6:], before[:, 6:])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
def test_rows_stand_alone(isa: str, dtype: torch.dtype, is_neox: bool) -> None:
    table = make_table(400, 64)
    positions = torch.arange(400)
    query = random_rows(400, 9 * 64, dtype=dtype, seed=4)

    def run(rows: list[int]) -> torch.Tensor:
        picked, key = query[rows], query[rows][:, : 3 * 64].clone()
        rope.rotary_embedding(positions[rows], picked, key, 64, table, is_neox)
        return torch.cat((picked, key), -1)

    assert_rows_stand_alone(run, 400)


def test_bad_arguments_name_what_was_given() -> None:
    table, positions = make_table(10, 8), torch.arange(3)
    query, key = torch.randn(3, 16), torch.randn(3, 8)
    before = query.clone()
    with pytest.raises(ShapeError, match="position 10 of token 1 lies outside the table of 10"):
        rope.rotary_embedding(torch.tensor([0, 10, 1]), query, key, 8, table, True)
    with pytest.raises(ShapeError, match="position -1"):
        rope.rotary_embedding(torch.tensor([0, 1, -1]), query, key, 8, table, True)
    with pytest.raises(ShapeError, match="positions is Int, expected Long"):
        rope.rotary_embedding(positions.int(), query, key, 8, table, True)
    with pytest.raises(ShapeError, match="even size of 2 to 8"):
        rope.rotary_embedding(positions, query, key, 8, make_table(10, 16), True)
    with pytest.raises(ShapeError, match=r"query has shape \[3, 16\], expected \[T, heads \* 10\]"):
        rope.rotary_embedding(positions, query, torch.randn(3, 10), 10, table, True)
    with pytest.raises(ShapeError, match="key is BFloat16, expected Float"):
        rope.rotary_embedding(positions, query, key.bfloat16(), 8, table, True)
    with pytest.raises(ShapeError, match="dimension 0 must be 3"):
        rope.rotary_embedding(positions, query, torch.randn(2, 8), 8, table, True)
    assert torch.equal(query, before)
