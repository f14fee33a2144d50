"""The choice of experts by scores, corrections and groups on a GPU against its twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests._custom_ops.gpu.tensors import DTYPES, NEEDS_GPU
from tests.utils.ops import random_rows
from vllm._custom_ops import moe
from vllm._custom_ops.moe import ExpertChoice
from vllm._custom_ops.naive import moe as naive
from vllm.errors import ShapeError
from vllm.model_executor.layers.float_router import FloatRouter

pytestmark = NEEDS_GPU
NUM_TOKENS = 50


def make_outputs(k: int, device: str) -> tuple[Tensor, Tensor]:
    weights = torch.full((NUM_TOKENS, k), float("nan"), device=device)
    return weights, torch.full((NUM_TOKENS, k), -1, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("experts", "k", "groups", "chosen_groups"),
    [(4, 1, 1, 1), (60, 4, 1, 1), (64, 6, 8, 3), (160, 6, 8, 3), (256, 8, 8, 4), (512, 22, 1, 1)],
)
@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_equals_twin(
    dtype: torch.dtype, experts: int, k: int, groups: int, chosen_groups: int, is_sigmoid: bool
) -> None:
    # Distinct logits: the order of equal ones is another test's.
    generator = torch.Generator().manual_seed(experts)
    rows = [torch.randperm(experts, generator=generator) for _ in range(NUM_TOKENS)]
    logits = (torch.stack(rows).float() / 64.0 - 2.0).to(dtype)
    correction = random_rows(experts, dtype=torch.float32, seed=2) if is_sigmoid else None
    choice = ExpertChoice(
        num_experts=experts,
        num_groups=groups,
        num_chosen_groups=chosen_groups,
        is_sigmoid=is_sigmoid,
        renormalize=is_sigmoid,
        epsilon=1e-20,
        scale=2.5,
    )
    expected, found = make_outputs(k, "cpu"), make_outputs(k, "cuda")
    on_gpu = logits.cuda(), None if correction is None else correction.cuda()
    naive.choose_experts(*expected, logits, correction, choice)
    moe.choose_experts(*found, *on_gpu, choice)
    torch.testing.assert_close(found[0].cpu(), expected[0], rtol=1e-5, atol=1e-7)
    assert torch.equal(found[1].cpu(), expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_gate", [False, True])
def test_shared_experts_follow_the_chosen(dtype: torch.dtype, has_gate: bool) -> None:
    logits = random_rows(NUM_TOKENS, 80, dtype=dtype, seed=5, scale=2.0)
    choice = ExpertChoice(num_experts=64, num_shared=2, has_shared_gate=has_gate, renormalize=True)
    expected, found = make_outputs(10, "cpu"), make_outputs(10, "cuda")
    naive.choose_experts(*expected, logits, None, choice)
    moe.choose_experts(*found, logits.cuda(), None, choice)
    torch.testing.assert_close(found[0].cpu(), expected[0], rtol=1e-5, atol=1e-7)
    assert (found[1][:, 8:].cpu() == torch.tensor([64, 65])).all()
    assert (found[1][:, :8] < 64).all()


def test_equal_scores_go_by_number() -> None:
    weights, indices = make_outputs(3, "cuda")
    choice = ExpertChoice(num_experts=8, num_groups=4, num_chosen_groups=2, is_sigmoid=True)
    moe.choose_experts(weights, indices, torch.zeros(NUM_TOKENS, 8).cuda(), None, choice)
    assert (indices.cpu() == torch.tensor([0, 1, 2])).all()
    assert (weights == 0.5).all()


def test_bad_arguments_name_what_was_given() -> None:
    outputs, logits = make_outputs(9, "cuda"), torch.zeros(NUM_TOKENS, 64).cuda()
    with pytest.raises(ShapeError, match="1 to 8 here"):
        moe.choose_experts(*outputs, logits, None, ExpertChoice(num_experts=64, num_groups=8))
    with pytest.raises(ShapeError, match="num_groups is 7"):
        moe.choose_experts(*outputs, logits, None, ExpertChoice(num_experts=64, num_groups=7))
    with pytest.raises(ShapeError, match="at least 66 columns"):
        choice = ExpertChoice(num_experts=64, num_shared=2, has_shared_gate=True)
        moe.choose_experts(*outputs, logits, None, choice)


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_float_router_multiplies_in_float32(is_narrow: bool, num_tokens: int) -> None:
    router = FloatRouter(256, 64)
    weight = random_rows(64, 256, dtype=torch.float32, seed=3)
    router.parameter("weight").copy_(weight.bfloat16() if is_narrow else weight)
    exact = router.parameter("weight").double()
    router.cuda().pack()
    assert (router.narrow is not None) == is_narrow
    x = random_rows(num_tokens, 256, dtype=torch.bfloat16, seed=4)
    logits = router(x.cuda())
    assert logits.dtype == torch.float32
    expected = (x.double() @ exact.t()).float()
    torch.testing.assert_close(logits.cpu(), expected, rtol=1e-4, atol=1e-4)
