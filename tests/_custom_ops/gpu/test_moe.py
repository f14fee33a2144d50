"""Experts in real shapes on a GPU: against float32, in a graph, whatever order pairs come in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests._custom_ops.gpu.graphs import capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_EXPERTS, HIDDEN = 64, 2048


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, device="cuda", generator=generator) * scale).bfloat16()


def route(num_tokens: int, k: int) -> tuple[Tensor, Tensor]:
    """Return weights and experts; expert 5 is never chosen, expert 0 often."""
    scores = draw(1, num_tokens, NUM_EXPERTS).float()
    scores[:, 0] += 2.0
    scores[:, 5] = float("-inf")
    chosen = scores.softmax(-1).topk(k, dim=-1)
    return chosen.values, chosen.indices.int()


def make(inner: int) -> tuple[Tensor, Tensor]:
    w13 = draw(2, NUM_EXPERTS, 2 * inner, HIDDEN, scale=HIDDEN**-0.5)
    w2 = draw(3, NUM_EXPERTS, HIDDEN, inner, scale=inner**-0.5)
    w13[5] = w2[5] = float("nan")
    return w13, w2


def compute(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in ids.unique().tolist():
        tokens, places = torch.where(ids == expert)
        gate_up = F.linear(x[tokens].float(), w13[expert].float()).bfloat16()
        gate, up = gate_up.chunk(2, dim=-1)
        part = F.linear((F.silu(gate) * up).float(), w2[expert].float())
        total.index_add_(0, tokens, part * weights[tokens, places, None])
    return total


@pytest.mark.parametrize("inner, k", [(512, 8), (1408, 6)])
@pytest.mark.parametrize("num_tokens", [1, 8, 11, 64, 300, 1024, 8192])
def test_experts_are_near_float32(num_tokens: int, inner: int, k: int) -> None:
    from vllm._custom_ops.triton import moe

    x, (w13, w2), routing = draw(4, num_tokens, HIDDEN), make(inner), route(num_tokens, k)
    out = torch.full_like(x, float("nan"))
    moe.fused_experts(out, x, w13, w2, *routing, inner, "silu")
    expected = compute(x, w13, w2, *routing)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("inner, k", [(512, 8), (1408, 6)])
@pytest.mark.parametrize("num_tokens", [2, 16, 17, 64, 200, 2000])
def test_all_tokens_choose_alike(num_tokens: int, inner: int, k: int) -> None:
    from vllm._custom_ops.triton import moe

    x, (w13, w2), (weights, ids) = draw(4, num_tokens, HIDDEN), make(inner), route(num_tokens, k)
    ids = ids[:1].expand(num_tokens, -1).contiguous()
    out = torch.full_like(x, float("nan"))
    moe.fused_experts(out, x, w13, w2, weights, ids, inner, "silu")
    expected = compute(x, w13, w2, weights, ids)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 1024])
def test_replays_follow_their_inputs(num_tokens: int) -> None:
    """A graph computes what its inputs hold now, to the same bits as without one."""
    from vllm._custom_ops.triton import moe

    x, (w13, w2), (weights, ids) = draw(4, num_tokens, HIDDEN), make(512), route(num_tokens, 8)
    out = torch.empty_like(x)

    def run() -> None:
        moe.fused_experts(out, x, w13, w2, weights, ids, 512, "silu")

    graph = capture(run)
    for seed in range(20):
        x.copy_(draw(10 + seed, num_tokens, HIDDEN))
        ids.copy_(ids.roll(1, 0))
        run()
        expected = out.clone()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("num_tokens", [1, 8, 40, 500, 2000])
def test_other_experts_equal_twin_of_few_tokens(num_tokens: int) -> None:
    from vllm._custom_ops.naive import moe as naive
    from vllm._custom_ops.triton import moe

    inner, rows = 384, slice(0, 3)
    up = draw(5, NUM_EXPERTS, 2 * inner, HIDDEN, scale=HIDDEN**-0.5)
    down = draw(6, NUM_EXPERTS, HIDDEN, inner, scale=inner**-0.5)
    biases = draw(7, NUM_EXPERTS, 2 * inner), draw(8, NUM_EXPERTS, HIDDEN)
    x, (weights, ids) = draw(9, num_tokens, HIDDEN), route(num_tokens, 4)
    out, expected = torch.empty_like(x), torch.empty_like(x[rows])
    few = (weights[rows], ids[rows])
    moe.fused_biased_experts(out, x, up, biases[0], down, biases[1], weights, ids, 1.702, 7.0)
    naive.fused_biased_experts(expected, x[rows], up, biases[0], down, biases[1], *few, 1.702, 7.0)
    torch.testing.assert_close(out[rows], expected, rtol=2e-2, atol=4e-2)
    up = up[:, :inner].contiguous()
    moe.fused_relu2_experts(out, x, up, down, weights, ids)
    naive.fused_relu2_experts(expected, x[rows], up, down, *few)
    torch.testing.assert_close(out[rows], expected, rtol=2e-2, atol=4e-2)


def compute_by(runner: str, form: dict[str, Any], num_tokens: int, inner: int, k: int) -> None:
    """Check a form of `moe.run_single` or `moe.run_grouped`, chosen or not."""
    from vllm._custom_ops.triton import moe
    from vllm._custom_ops.triton.moe_product import Product
    from vllm._custom_ops.triton.moe_single import Strip
    from vllm._custom_ops.triton.moe_tile import Tile

    x, (w13, w2), routing = draw(4, num_tokens, HIDDEN), make(inner), route(num_tokens, k)
    first = Product(weight=w13, bias=None, num_outputs=inner, up_offset=inner, activation="silu")
    second = Product(weight=w2, bias=None, num_outputs=HIDDEN)
    out = torch.full_like(x, float("nan"))
    kind = Strip if runner == "run_single" else Tile
    getattr(moe, runner)(out, x, first, second, *routing, kind(**form))
    torch.testing.assert_close(out.float(), compute(x, w13, w2, *routing), rtol=2e-2, atol=1e-2)


def tile(m: int, n: int, k: int, warps: int, stages: int, **flags: int) -> dict[str, Any]:
    sizes = {"block_m": m, "block_n": n, "block_k": k, "num_warps": warps, "num_stages": stages}
    return sizes | flags


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs the copy engine of Hopper",
)
@pytest.mark.parametrize(
    ("num_tokens", "form"),
    [
        (64, tile(16, 64, 128, 4, 4)),
        (512, tile(64, 256, 64, 8, 4)),
        (2048, tile(128, 256, 64, 8, 4)),
        (2048, tile(128, 256, 64, 8, 3, small_m=64)),
        (4096, tile(64, 128, 64, 4, 4, small_m=16)),
    ],
)
@pytest.mark.parametrize("inner, k", [(512, 8), (1408, 6)])
def test_tiles_by_descriptors(num_tokens: int, form: dict[str, Any], inner: int, k: int) -> None:
    compute_by("run_grouped", form | {"has_descriptors": True}, num_tokens, inner, k)


def test_single_pairs_of_some_tokens() -> None:
    strip = {"block_n": 32, "block_k": 128, "num_warps": 4, "num_stages": 3}
    compute_by("run_single", strip, 3, 1408, 6)
