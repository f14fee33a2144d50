"""The rotary op on a GPU against its twin: pairings, partial heads, strides, graphs, errors."""

from __future__ import annotations

import pytest
import torch

from tests._custom_ops.gpu.graphs import capture
from tests._custom_ops.gpu.tensors import DTYPES, NEEDS_GPU, assert_near, draw, make_table
from vllm._custom_ops import rope as ops
from vllm._custom_ops.naive import rope as naive
from vllm.errors import ShapeError

pytestmark = NEEDS_GPU
HEADS = [(64, 64), (128, 128), (128, 64), (80, 32), (24, 24), (96, 12), (256, 256), (512, 512)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "rot_dim"), [*HEADS, (8, 2)])
@pytest.mark.parametrize("is_neox", [True, False])
def test_equals_twin(dtype: torch.dtype, head_size: int, rot_dim: int, is_neox: bool) -> None:
    table = make_table(100, rot_dim)
    positions = torch.tensor([0, 99, 5, 5, 42, 7, 1]).cuda()
    query = draw(7, 3 * head_size, dtype=dtype, seed=1)
    key = draw(7, 2 * head_size, dtype=dtype, seed=2)
    query_naive, key_naive = query.clone(), key.clone()
    ops.rotary_embedding(positions, query, key, head_size, table, is_neox)
    naive.rotary_embedding(positions, query_naive, key_naive, head_size, table, is_neox)
    assert_near(query, query_naive)
    assert_near(key, key_naive)


@pytest.mark.parametrize("first", [0, 3])
def test_slices_are_turned_in_place(first: int) -> None:
    """Also slices that begin off 16 bytes, as the turning part of a latent row may."""
    table, positions = make_table(50, 16), torch.arange(5).cuda()
    rows = draw(5, 8, 20, dtype=torch.bfloat16, seed=3)
    expected = rows.clone()
    for module, x in ((ops, rows), (naive, expected)):
        query, key = x[:, :4, first : first + 16], x[:, 4:6, first : first + 16]
        module.rotary_embedding(positions, query, key, 16, table, True)
    assert_near(rows, expected)
    assert torch.equal(rows[:, 6:], expected[:, 6:])


def test_graph_replays_equal() -> None:
    table, positions = make_table(50, 128), torch.tensor([3, 40]).cuda()
    x = draw(2, 12, 128, dtype=torch.bfloat16, seed=4)
    static = x.clone()
    graph = capture(
        lambda: ops.rotary_embedding(positions, static[:, :8], static[:, 8:], 128, table, True)
    )
    static.copy_(x)
    graph.replay()
    ops.rotary_embedding(positions, x[:, :8], x[:, 8:], 128, table, True)
    assert torch.equal(static, x)


def test_bad_arguments_name_what_was_given() -> None:
    table, positions = make_table(10, 8), torch.arange(3).cuda()
    query, key = draw(3, 16, dtype=torch.float32), draw(3, 8, dtype=torch.float32)
    with pytest.raises(ShapeError, match="positions is Int, expected Long"):
        ops.rotary_embedding(positions.int(), query, key, 8, table, True)
    with pytest.raises(ShapeError, match="positions must be on a CUDA device"):
        ops.rotary_embedding(positions.cpu(), query, key, 8, table, True)
    with pytest.raises(ShapeError, match="even size of 2 to 8"):
        ops.rotary_embedding(positions, query, key, 8, make_table(10, 16), True)
    with pytest.raises(ShapeError, match=r"query has shape \[3, 16\], expected \[T, heads \* 10\]"):
        ops.rotary_embedding(positions, query, key, 10, table, True)
