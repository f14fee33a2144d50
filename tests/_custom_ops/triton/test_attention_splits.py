"""How decode attention is cut into programs, and that each cut gives the same."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests._custom_ops.triton.test_attention import Problem, make_args, move
from vllm._custom_ops.naive import attention as naive
from vllm._custom_ops.triton.attention_decode import decode_attention
from vllm._custom_ops.triton.attention_shape import Splits, Tile, count_splits, fit_decode_tile


@pytest.mark.parametrize("launched", [1, 3, 7, 17, 64])
def test_any_number_of_splits_reads_every_key(device: str, launched: int) -> None:
    problem = Problem(rows=tuple((n, 1) for n in (0, 15, 31, 32, 95, 96, 200)), is_fresh=False)
    arguments = problem.arguments()
    expected = arguments["out_THD"].clone()
    naive.paged_attention(**(arguments | {"out_THD": expected}))
    args = make_args(move(arguments, device))
    tile = Tile(block_m=16, block_n=16, num_warps=4, num_stages=2)
    splits = Splits(launched=launched, even=launched // 2 + 1)
    decode_attention(args, len(problem.rows), 300, tile, splits)
    torch.testing.assert_close(args.out.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "size"), [(16, 576), (3, 72)])
def test_programs_may_share_the_values_of_a_head(device: str, heads: int, size: int) -> None:
    problem = Problem(
        rows=((100, 1), (0, 1), (40, 1)), heads=heads, head_size=size, has_one_field=True
    )
    arguments = problem.arguments()
    expected = arguments["out_THD"].clone()
    naive.paged_attention(**(arguments | {"out_THD": expected}))
    args = make_args(move(arguments, device))
    tile = Tile(block_m=16, block_n=32, num_warps=4, num_stages=2, value_parts=-(-size // 64))
    decode_attention(args, len(problem.rows), 128, tile)
    torch.testing.assert_close(args.out.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_splits_follow_the_batch() -> None:
    tile = Tile(block_m=16, block_n=64, num_warps=8, num_stages=3)
    assert count_splits(256, 640, tile, 128, 132) == Splits(launched=1, even=1)
    assert count_splits(256, 4096, tile, 128, 132) == Splits(launched=2, even=1)
    assert count_splits(64, 8320, tile, 128, 132) == Splits(launched=8, even=4)
    assert count_splits(4, 32768, tile, 128, 132) == Splits(launched=33, even=33)
    assert count_splits(4, 640, tile, 128, 132) == Splits(launched=11, even=11)
    assert count_splits(5000, 4096, tile, 128, 132) == Splits(launched=1, even=1)
    # Of long sums, fewer splits are soonest folded.
    assert count_splits(2, 4096, tile, 576, 132) == Splits(launched=16, even=16)
    assert count_splits(2, 65536, tile, 576, 132) == Splits(launched=64, even=16)


def test_tiles_follow_the_batch() -> None:
    device = torch.device("cpu")  # of four processors

    def fit(head_size: int, num_groups: int, has_one_field: bool = False) -> tuple[int, ...]:
        tile = fit_decode_tile(8, head_size, 2, has_one_field, num_groups, device)
        return tile.block_n, tile.num_warps, tile.value_parts

    assert fit(128, 1) == fit(128, 8) == (64, 8, 1)
    assert fit(128, 9) == (32, 4, 1)
    assert fit(256, 64) == (64, 8, 1)
    assert fit(256, 65) == (32, 4, 1)
    assert fit(576, 1, has_one_field=True) == (64, 4, 9)
    assert fit(576, 2, has_one_field=True) == (32, 4, 1)
