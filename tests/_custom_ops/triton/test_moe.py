"""Experts against their twins: single pairs and groups, idle experts, odd sizes, padding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.utils.ops import poisoned, random_rows
from vllm._custom_ops.naive import moe as naive
from vllm._custom_ops.naive.linear import pack_linear_weight
from vllm._custom_ops.triton import moe, moe_routing, moe_single, moe_tile
from vllm.errors import ShapeError

NUM_EXPERTS = 5
UNTOUCHED = 3
HIDDEN, INNER = 28, 20

Op = Callable[..., None]


def stack(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return a stack of matrices; those of one expert are not numbers."""
    weight = random_rows(NUM_EXPERTS, rows, columns, dtype=dtype, seed=seed, scale=columns**-0.5)
    weight[UNTOUCHED] = float("nan")
    return weight


def route(num_tokens: int, k: int, *, same: bool = False) -> tuple[Tensor, Tensor]:
    weights = random_rows(num_tokens, k, dtype=torch.float32, seed=5).abs()
    if same:
        return weights, torch.full((num_tokens, k), 2, dtype=torch.int32)
    scores = random_rows(num_tokens, NUM_EXPERTS, dtype=torch.float32, seed=6)
    scores[:, UNTOUCHED] = float("-inf")
    return weights, scores.topk(k, dim=1).indices.int()


def run_gated(activation: str) -> tuple[Op, Op, Callable[[torch.dtype], list[Tensor]]]:
    def make(dtype: torch.dtype) -> list[Tensor]:
        return [stack(2 * INNER, HIDDEN, dtype, 1), stack(HIDDEN, INNER, dtype, 2)]

    def run(out: Tensor, x: Tensor, w13: Tensor, w2: Tensor, *routing: Tensor) -> None:
        moe.fused_experts(out, x, w13, w2, *routing, INNER, activation)

    def run_twin(out: Tensor, x: Tensor, w13: Tensor, w2: Tensor, *routing: Tensor) -> None:
        packed = (torch.stack([pack_linear_weight(w) for w in stack]) for stack in (w13, w2))
        naive.fused_experts(out, x, *packed, *routing, INNER, activation)

    return run, run_twin, make


def run_biased(has_down_bias: bool) -> tuple[Op, Op, Callable[[torch.dtype], list[Tensor]]]:
    def make(dtype: torch.dtype) -> list[Tensor]:
        return [
            stack(2 * INNER, HIDDEN, dtype, 1) * 3.0,  # some gates reach the limit
            random_rows(NUM_EXPERTS, 2 * INNER, dtype=dtype, seed=3),
            stack(HIDDEN, INNER, dtype, 2),
            random_rows(NUM_EXPERTS, HIDDEN, dtype=dtype, seed=4),
        ]

    def bind(op: Op) -> Op:
        def run(out: Tensor, x: Tensor, *rest: Tensor) -> None:
            *weights, down_bias, topk_weights, ids = rest
            bias = down_bias if has_down_bias else None
            op(out, x, *weights, bias, topk_weights, ids, 1.702, 2.0)

        return run

    return bind(moe.fused_biased_experts), bind(naive.fused_biased_experts), make


def run_relu2() -> tuple[Op, Op, Callable[[torch.dtype], list[Tensor]]]:
    def make(dtype: torch.dtype) -> list[Tensor]:
        return [stack(INNER, HIDDEN, dtype, 1), stack(HIDDEN, INNER, dtype, 2)]

    return moe.fused_relu2_experts, naive.fused_relu2_experts, make


KINDS = {
    "silu": run_gated("silu"),
    "gelu": run_gated("gelu"),
    "gelu_tanh": run_gated("gelu_tanh"),
    "biased": run_biased(True),
    "biased, no down bias": run_biased(False),
    "relu2": run_relu2(),
}


def assert_equals_twin(
    kind: str, dtype: torch.dtype, device: str, x: Tensor, routing: tuple[Tensor, Tensor]
) -> None:
    run, run_twin, make = KINDS[kind]
    weights = make(dtype)
    out, expected = poisoned(x.shape, dtype).to(device), torch.empty_like(x)
    run(out, x.to(device), *(w.to(device) for w in weights), *(r.to(device) for r in routing))
    run_twin(expected, x, *weights, *routing)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=["single", "grouped", "described", "halved"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with pairs one by one and sorted by expert, in small tiles."""
    monkeypatch.setattr(moe, "MAX_SINGLE_TOKENS", 99 if request.param == "single" else 0)
    tile = moe_tile.Tile(
        block_m=32 if request.param == "halved" else 16,
        block_n=32,
        block_k=32,
        num_warps=4,
        num_stages=2,
        has_descriptors=request.param in ("described", "halved"),
        small_m=16 if request.param == "halved" else 0,
    )
    monkeypatch.setattr(moe, "choose_tile", lambda *_: tile)
    strip = moe_single.Strip(
        block_n=32,
        block_k=16,
        num_warps=4,
        num_stages=1,
    )
    monkeypatch.setattr(moe, "choose_strip", lambda: strip)
    return request.param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_experts_equal_twin(device: str, form: str, kind: str, dtype: torch.dtype) -> None:
    x = random_rows(3, HIDDEN, dtype=dtype, seed=7)
    assert_equals_twin(kind, dtype, device, x, route(3, 2))


@pytest.mark.parametrize("num_tokens, k", [(1, 1), (6, 3)])
def test_numbers_of_tokens(device: str, form: str, num_tokens: int, k: int) -> None:
    x = random_rows(num_tokens, HIDDEN, dtype=torch.float32, seed=8)
    assert_equals_twin("silu", torch.float32, device, x, route(num_tokens, k))


@pytest.mark.parametrize("num_tokens, k", [(33, 2), (70, 1)])
def test_sorted_tokens(
    device: str, monkeypatch: pytest.MonkeyPatch, num_tokens: int, k: int
) -> None:
    monkeypatch.setattr(moe, "MAX_SINGLE_TOKENS", 0)
    x = random_rows(num_tokens, HIDDEN, dtype=torch.float32, seed=8)
    assert_equals_twin("silu", torch.float32, device, x, route(num_tokens, k))


@pytest.mark.parametrize("num_tokens", [5, 70])
def test_one_expert_has_all_tokens(device: str, form: str, num_tokens: int) -> None:
    x = random_rows(num_tokens, HIDDEN, dtype=torch.float32, seed=9)
    assert_equals_twin("silu", torch.float32, device, x, route(num_tokens, 1, same=True))


def test_many_tokens_in_parts(device: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "MAX_PART_PAIRS", 5)
    x = random_rows(5, HIDDEN, dtype=torch.float32, seed=10)
    assert_equals_twin("relu2", torch.float32, device, x, route(5, 2))


def test_padding_counts_for_nothing(device: str, form: str) -> None:
    x = random_rows(4, HIDDEN, dtype=torch.float32, seed=11)
    weights, ids = route(4, 2)
    ids[1], ids[2, 0] = -1, NUM_EXPERTS
    x[1] = weights[1] = weights[2, 0] = float("nan")
    run, _, make = KINDS["silu"]
    stacks = make(torch.float32)
    out = poisoned(x.shape, x.dtype).to(device)
    run(out, x.to(device), *(w.to(device) for w in stacks), weights.to(device), ids.to(device))
    assert out[1].abs().sum() == 0
    others = (weights[[0, 3]], ids[[0, 3]])
    expected = torch.empty(2, HIDDEN)
    KINDS["silu"][1](expected, x[[0, 3]], *stacks, *others)
    torch.testing.assert_close(out[[0, 3]].cpu(), expected, rtol=2e-5, atol=2e-5)
    assert not out[2].isnan().any()


@pytest.mark.parametrize("num_experts, num_pairs, rows", [(1, 5, 16), (64, 40, 16), (7, 100, 32)])
@pytest.mark.parametrize("group_pairs", [16, 1024])
def test_blocks_hold_every_pair_once(
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    num_experts: int,
    num_pairs: int,
    rows: int,
    group_pairs: int,
) -> None:
    monkeypatch.setattr(moe_routing, "_GROUP_PAIRS", group_pairs)
    monkeypatch.setattr(moe_routing, "_MAX_BASES", 32)  # counts are added up by twos
    generator = torch.Generator().manual_seed(num_pairs)
    ids = torch.randint(0, num_experts, (num_pairs, 1), generator=generator).int()
    ids[3] = -1
    routing = moe_routing.sort_pairs(ids.to(device), num_experts, rows)
    order, ends = routing.order.cpu(), routing.ends.tolist()
    found = []
    blocks = torch.stack((routing.block_experts, routing.block_starts), 1).tolist()
    for expert, start in blocks:
        if expert >= 0:
            pairs = order[start : min(start + rows, ends[expert])].tolist()
            assert pairs
            assert (ids[pairs] == expert).all()
            found += pairs
    assert sorted(found) == [pair for pair in range(num_pairs) if pair != 3]


def test_bad_arguments_name_what_was_given(device: str) -> None:
    x = torch.empty(3, HIDDEN, device=device)
    w13, w2 = (w.to(device) for w in KINDS["silu"][2](torch.float32))
    weights, ids = (r.to(device) for r in route(3, 2))
    out = torch.zeros_like(x)
    with pytest.raises(ShapeError, match="activation is 'relu'"):
        moe.fused_experts(out, x, w13, w2, weights, ids, INNER, "relu")
    with pytest.raises(ShapeError, match="the second stack is torch"):
        moe.fused_experts(out, x, w13, w2.half(), weights, ids, INNER, "silu")
    with pytest.raises(ShapeError, match="topk_ids is torch"):
        moe.fused_experts(out, x, w13, w2, weights, ids.long(), INNER, "silu")
    with pytest.raises(ShapeError, match="the first stack is"):
        moe.fused_experts(out, x, w13, w2, weights, ids, INNER + 1, "silu")
    assert out.abs().sum() == 0
