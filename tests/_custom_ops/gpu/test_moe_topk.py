"""Routing to experts on a GPU against the op on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests._custom_ops.gpu.graphs import capture
from tests._custom_ops.gpu.tensors import DTYPES, NEEDS_GPU
from tests.utils.ops import random_rows
from vllm._custom_ops import moe
from vllm.errors import ShapeError

pytestmark = NEEDS_GPU
SIZES = [(1, 1), (8, 2), (60, 4), (64, 6), (128, 8), (160, 6), (256, 8), (512, 10), (512, 32)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "k"), SIZES)
@pytest.mark.parametrize("renormalize", [False, True])
def test_equals_cpu(dtype: torch.dtype, experts: int, k: int, renormalize: bool) -> None:
    gating = random_rows(50, experts, dtype=dtype, seed=experts, scale=2.0)
    gating[0] = float("nan")
    gating[1] = 0.0
    gating[2, experts // 2] = float("inf")
    gating[3, ::2] = float("-inf")
    expected = torch.zeros(50, k), torch.zeros(50, k, dtype=torch.int32)
    found = [t.cuda() for t in expected]
    moe.topk_softmax(*expected, gating.float(), renormalize)
    moe.topk_softmax(*found, gating.cuda(), renormalize)
    torch.testing.assert_close(found[0].cpu(), expected[0], rtol=1e-5, atol=1e-7)
    probabilities = torch.softmax(gating.float()[4:], -1)
    chosen = [probabilities.gather(1, t[4:].long().cpu()) for t in (found[1], expected[1])]
    # Two experts whose probabilities are one bit apart may change places.
    torch.testing.assert_close(*chosen, rtol=1e-6, atol=1e-8)
    assert torch.equal(found[1][:2].cpu(), expected[1][:2])
    assert (found[1].sort(-1).values.diff(dim=-1) > 0).all()


def test_strided_rows_and_graphs() -> None:
    wide = random_rows(33, 200, dtype=torch.bfloat16, seed=1).cuda()
    outs = torch.zeros(33, 4).cuda(), torch.zeros(33, 4, dtype=torch.int32).cuda()
    graph = capture(lambda: moe.topk_softmax(*outs, wide[:, :64], True))
    wide.copy_(wide.flip(0))
    graph.replay()
    expected = [torch.zeros_like(t) for t in outs]
    moe.topk_softmax(*expected, wide[:, :64].contiguous(), True)
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


def test_bad_arguments_name_what_was_given() -> None:
    outs = torch.zeros(2, 33).cuda(), torch.zeros(2, 33, dtype=torch.int32).cuda()
    with pytest.raises(ShapeError, match="1 to 32 on CUDA"):
        moe.topk_softmax(*outs, torch.zeros(2, 64).cuda(), False)
    with pytest.raises(ShapeError, match="1 to 512 experts"):
        moe.topk_softmax(*outs, torch.zeros(2, 513).cuda(), False)
