"""Routing and experts against their twins: ties, idle experts, odd sizes, the bit rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.utils.ops import (
    FLOAT_DTYPES,
    assert_rows_stand_alone,
    poisoned,
    random_rows,
)
from vllm._custom_ops import moe
from vllm._custom_ops.linear import pack_linear_weight, pack_weight_stack
from vllm._custom_ops.naive import moe as naive
from vllm.errors import ShapeError

Run = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""An op with its weights: out, x, topk_weights, topk_ids."""

OTHER_KINDS = ("biased", "biased, no down bias", "relu2")
ALPHA, LIMIT = 1.702, 1.5


def route(gating: Tensor, k: int, renormalize: bool, ops=moe) -> tuple[Tensor, Tensor]:
    weights = torch.full((gating.shape[0], k), float("nan"))
    indices = torch.full((gating.shape[0], k), -1, dtype=torch.int32)
    ops.topk_softmax(weights, indices, gating, renormalize)
    return weights, indices


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("experts, k", [(1, 1), (4, 2), (8, 8), (60, 4), (129, 6)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_equals_twin(
    isa: str, dtype: torch.dtype, experts: int, k: int, renormalize: bool
) -> None:
    gating = random_rows(11, experts, dtype=dtype, seed=experts, scale=4.0)
    gating[0] = 0.5  # all equal: the lowest numbers win
    weights, indices = route(gating, k, renormalize)
    expected_weights, expected_indices = route(gating, k, renormalize, ops=naive)
    assert torch.equal(indices, expected_indices)
    torch.testing.assert_close(weights, expected_weights, rtol=2e-6, atol=1e-7)
    assert indices[0].tolist() == list(range(k))


def test_routing_of_logits_that_are_not_numbers() -> None:
    nan, inf = float("nan"), float("inf")
    gating = torch.tensor([[nan, nan, nan, nan], [nan, 1.0, -inf, 2.0]])
    _, indices = route(gating, 2, True)
    assert len(set(indices[0].tolist())) == 2
    assert indices[1].tolist() == [3, 1]


def make_experts(
    experts: int, hidden: int, inner: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    w13 = random_rows(experts, 2 * inner, hidden, dtype=dtype, seed=1, scale=hidden**-0.5)
    w2 = random_rows(experts, hidden, inner, dtype=dtype, seed=2, scale=inner**-0.5)
    return (
        torch.stack([pack_linear_weight(w) for w in w13]),
        torch.stack([pack_linear_weight(w) for w in w2]),
    )


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(
    "experts, k, hidden, inner", [(4, 2, 64, 32), (3, 1, 33, 17), (9, 3, 72, 104)]
)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_experts_equal_twin(
    isa: str, dtype: torch.dtype, experts: int, k: int, hidden: int, inner: int, activation: str
) -> None:
    w13, w2 = make_experts(experts, hidden, inner, dtype)
    x = random_rows(13, hidden, dtype=dtype, seed=3)
    gating = random_rows(13, experts, dtype=dtype, seed=4)
    gating[:, 1] = -100.0  # an expert without tokens
    weights, ids = route(gating, k, True)
    actual, expected = poisoned(x.shape, dtype), torch.empty_like(x)
    moe.fused_experts(actual, x, w13, w2, weights, ids, inner, activation)
    naive.fused_experts(expected, x, w13, w2, weights, ids, inner, activation)
    if dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_rows_stand_alone(isa: str, dtype: torch.dtype) -> None:
    w13, w2 = make_experts(6, 96, 80, dtype)
    x = random_rows(260, 96, dtype=dtype, seed=5)
    gating = random_rows(260, 6, dtype=dtype, seed=6)

    def run(rows: list[int]) -> Tensor:
        weights, ids = route(gating[rows], 3, False)
        out = poisoned((len(rows), 96), dtype)
        moe.fused_experts(out, x[rows], w13, w2, weights, ids, 80, "silu")
        return out

    assert_rows_stand_alone(run, 260)


def test_many_tokens_are_computed_in_parts() -> None:
    w13, w2 = make_experts(2, 8, 4, torch.float32)
    x = random_rows(9000, 8, dtype=torch.float32, seed=7)
    weights, ids = route(random_rows(9000, 2, dtype=torch.float32, seed=8), 1, True)
    out, last = poisoned(x.shape, x.dtype), poisoned((10, 8), x.dtype)
    moe.fused_experts(out, x, w13, w2, weights, ids, 4, "silu")
    moe.fused_experts(last, x[-10:], w13, w2, weights[-10:], ids[-10:], 4, "silu")
    assert torch.equal(out[-10:], last)
    assert not out.isnan().any()


def test_strided_rows_and_no_rows() -> None:
    w13, w2 = make_experts(2, 16, 8, torch.float32)
    wide = random_rows(5, 40, dtype=torch.float32, seed=9)
    weights, ids = route(random_rows(5, 2, dtype=torch.float32, seed=10), 2, True)
    strided, plain = poisoned((5, 40), torch.float32), poisoned((5, 16), torch.float32)
    moe.fused_experts(strided[:, 4:20], wide[:, 8:24], w13, w2, weights, ids, 8, "silu")
    moe.fused_experts(plain, wide[:, 8:24].contiguous(), w13, w2, weights, ids, 8, "silu")
    assert torch.equal(strided[:, 4:20], plain)
    assert strided[:, 20:].isnan().all()
    none = torch.empty(0, 16)
    moe.fused_experts(none, none, w13, w2, torch.empty(0, 2), torch.empty(0, 2).int(), 8, "silu")


def test_bad_arguments_name_what_was_given() -> None:
    w13, w2 = make_experts(2, 16, 8, torch.float32)
    x, out = torch.randn(3, 16), torch.zeros(3, 16)
    weights, ids = torch.ones(3, 1), torch.zeros(3, 1).int()
    with pytest.raises(ShapeError, match="topk_ids has 2 for token 1, allowed: 0 to 1"):
        moe.fused_experts(
            out, x, w13, w2, weights, ids + torch.tensor([[0], [2], [0]]).int(), 8, "silu"
        )
    with pytest.raises(ShapeError, match="activation is 'relu', allowed: silu"):
        moe.fused_experts(out, x, w13, w2, weights, ids, 8, "relu")
    with pytest.raises(ShapeError, match=r"w13_packed .* dimension 1"):
        moe.fused_experts(out, x, w13, w2, weights, ids, 24, "silu")
    with pytest.raises(ShapeError, match="w2_packed is BFloat16, expected Float"):
        moe.fused_experts(out, x, w13, w2.bfloat16(), weights, ids, 8, "silu")
    with pytest.raises(ShapeError, match="topk_ids is Long, expected Int"):
        moe.fused_experts(out, x, w13, w2, weights, ids.long(), 8, "silu")
    with pytest.raises(ShapeError, match="1 to the number of experts, 2"):
        moe.topk_softmax(torch.empty(3, 3), torch.empty(3, 3).int(), torch.randn(3, 2), True)
    assert out.abs().sum() == 0


def make_stacks(
    kind: str, experts: int, hidden: int, inner: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the plain weights of experts that are not of `fused_experts`."""
    rows = inner if kind == "relu2" else 2 * inner
    first = random_rows(experts, rows, hidden, dtype=dtype, seed=1, scale=hidden**-0.5)
    return first, random_rows(experts, hidden, inner, dtype=dtype, seed=2, scale=inner**-0.5)


def bind(kind: str, first: Tensor, second: Tensor) -> tuple[Run, Run]:
    """Return the op over packed weights, and its twin over plain ones."""
    up, down = (pack_weight_stack(stack) for stack in (first, second))
    if kind == "relu2":
        return (
            lambda out, x, *routing: moe.fused_relu2_experts(out, x, up, down, *routing),
            lambda out, x, *routing: naive.fused_relu2_experts(out, x, first, second, *routing),
        )
    first_bias = random_rows(*first.shape[:2], dtype=first.dtype, seed=3)
    second_bias = random_rows(*second.shape[:2], dtype=first.dtype, seed=4)
    last = second_bias if kind == "biased" else None

    def run(out: Tensor, x: Tensor, weights: Tensor, ids: Tensor) -> None:
        moe.fused_biased_experts(out, x, up, first_bias, down, last, weights, ids, ALPHA, LIMIT)

    def run_twin(out: Tensor, x: Tensor, weights: Tensor, ids: Tensor) -> None:
        naive.fused_biased_experts(
            out, x, first, first_bias, second, last, weights, ids, ALPHA, LIMIT
        )

    return run, run_twin


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(
    "experts, k, hidden, inner", [(4, 2, 64, 32), (3, 1, 33, 17), (9, 3, 72, 104)]
)
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_experts_equal_twin(
    isa: str, dtype: torch.dtype, experts: int, k: int, hidden: int, inner: int, kind: str
) -> None:
    run, run_twin = bind(kind, *make_stacks(kind, experts, hidden, inner, dtype))
    x = random_rows(13, hidden, dtype=dtype, seed=5)
    gating = random_rows(13, experts, dtype=dtype, seed=6)
    gating[:, 1] = -100.0  # an expert without tokens
    routing = route(gating, k, True)
    actual, expected = poisoned(x.shape, dtype), torch.empty_like(x)
    run(actual, x, *routing)
    run_twin(expected, x, *routing)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_rows_of_other_experts_stand_alone(isa: str, dtype: torch.dtype, kind: str) -> None:
    op, _ = bind(kind, *make_stacks(kind, 6, 96, 80, dtype))
    x = random_rows(260, 96, dtype=dtype, seed=7)
    gating = random_rows(260, 6, dtype=dtype, seed=8)

    def run(rows: list[int]) -> Tensor:
        out = poisoned((len(rows), 96), dtype)
        op(out, x[rows], *route(gating[rows], 3, False))
        return out

    assert_rows_stand_alone(run, 260)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize("row", [0, 1, 39], ids=["gate", "up", "last"])
def test_what_is_not_a_number_stays_so(isa: str, dtype: torch.dtype, kind: str, row: int) -> None:
    """In the rows of those tokens that took the expert; neither clamp nor ReLU hides it."""
    first, second = make_stacks(kind, 3, 24, 20 * (2 if kind == "relu2" else 1), dtype)
    first[1, row] = float("nan")
    run, _ = bind(kind, first, second)
    x = random_rows(4, 24, dtype=dtype, seed=9)
    ids = torch.tensor([[0, 2], [1, 2], [2, 0], [2, 1]], dtype=torch.int32)
    out = torch.zeros_like(x)
    run(out, x, torch.ones(4, 2), ids)
    assert out.isnan().all(1).tolist() == [False, True, False, True]
    assert not out[::2].isnan().any()


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_many_tokens_of_other_experts_are_computed_in_parts(kind: str) -> None:
    run, _ = bind(kind, *make_stacks(kind, 2, 8, 4, torch.float32))
    x = random_rows(9000, 8, dtype=torch.float32, seed=10)
    weights, ids = route(random_rows(9000, 2, dtype=torch.float32, seed=11), 1, True)
    out, last = poisoned(x.shape, x.dtype), poisoned((10, 8), x.dtype)
    run(out, x, weights, ids)
    run(last, x[-10:], weights[-10:], ids[-10:])
    assert torch.equal(out[-10:], last)
    assert not out.isnan().any()
    run(x[:0], x[:0], weights[:0], ids[:0])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_bad_biased_experts_name_what_was_given(dtype: torch.dtype) -> None:
    plain = make_stacks("biased", 2, 16, 8, dtype)
    up, down = (pack_weight_stack(stack) for stack in plain)
    x, out = torch.randn(3, 16, dtype=dtype), torch.zeros(3, 16, dtype=dtype)
    up_bias, down_bias = torch.zeros(2, 16, dtype=dtype), torch.zeros(2, 16, dtype=dtype)
    weights, ids = torch.ones(3, 1), torch.zeros(3, 1).int()

    def run(
        up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, ids: Tensor = ids
    ) -> None:
        moe.fused_biased_experts(out, x, up, up_bias, down, down_bias, weights, ids, ALPHA, LIMIT)

    with pytest.raises(ShapeError, match="topk_ids has 2 for token 0, allowed: 0 to 1"):
        run(up, up_bias, down, down_bias, ids=ids + 2)
    with pytest.raises(ShapeError, match=r"gate_up has shape .*, expected rank"):
        run(plain[0], up_bias, down, down_bias)
    with pytest.raises(ShapeError, match=r"gate_up_bias .* its last size must be even"):
        run(up, up_bias[:, :15].contiguous(), down, down_bias)
    with pytest.raises(ShapeError, match=r"gate_up has shape .* dimension 1 must be 3"):
        run(up, torch.zeros(2, 80, dtype=dtype), down, down_bias)
    with pytest.raises(ShapeError, match="gate_up_bias is Double, expected"):
        run(up, up_bias.double(), down, down_bias)
    with pytest.raises(ShapeError, match=r"down has shape .* dimension 0 must be 2"):
        run(up, up_bias, down[:1], down_bias)
    with pytest.raises(ShapeError, match=r"down_bias has shape .* dimension 1 must be 16"):
        run(up, up_bias, down, down_bias[:, :8].contiguous())
    with pytest.raises(ShapeError, match="down_bias must be contiguous"):
        run(up, up_bias, down, torch.zeros(2, 32, dtype=dtype)[:, :16])
    assert out.abs().sum() == 0


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_bad_relu2_experts_name_what_was_given(dtype: torch.dtype) -> None:
    plain = make_stacks("relu2", 2, 16, 40, dtype)
    up, down = (pack_weight_stack(stack) for stack in plain)
    x, out = torch.randn(3, 16, dtype=dtype), torch.zeros(3, 16, dtype=dtype)
    weights, ids = torch.ones(3, 1), torch.zeros(3, 1).int()

    def run(up: Tensor, down: Tensor, ids: Tensor = ids) -> None:
        moe.fused_relu2_experts(out, x, up, down, weights, ids)

    with pytest.raises(ShapeError, match="topk_ids has -1 for token 0, allowed: 0 to 1"):
        run(up, down, ids=ids - 1)
    with pytest.raises(ShapeError, match=r"down has shape .*, expected rank"):
        run(up, plain[1])
    with pytest.raises(ShapeError, match=r"up has shape .*, dimension 1 must be 1"):
        run(up, pack_weight_stack(plain[1][..., :16]))
    with pytest.raises(ShapeError, match=r"up has shape .*, dimension 2 must be"):
        run(pack_weight_stack(plain[0][..., :8]), down)
    with pytest.raises(ShapeError, match=r"down has shape .* dimension 0 must be 2"):
        run(up, down[:1])
    with pytest.raises(ShapeError, match="experts must not be empty"):
        run(up[:, :0], down[:, :, :0])
    assert out.abs().sum() == 0
