"""Mixtures of experts on a GPU, over plain weight stacks. Triton.

Registered by `table.py`; doors in `_custom_ops/moe.py`. A decode step's few (token, expert) pairs
are taken one by one: programs stream the rows of the pair's expert, two launches in all. More pairs
are sorted by expert and multiplied in tiles. The host reads nothing back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm._custom_ops.triton.moe_grouped import choose_tile, multiply_grouped
from vllm._custom_ops.triton.moe_product import Product, sum_choices
from vllm._custom_ops.triton.moe_routing import sort_pairs
from vllm._custom_ops.triton.moe_single import (
    Strip,
    choose_strip,
    fits_counters,
    multiply_single,
)
from vllm._custom_ops.triton.moe_tile import Tile
from vllm.errors import ShapeError

MAX_SINGLE_TOKENS = 1
"""The pairs of so many tokens are taken one by one.

That begins 5 us sooner, but reads an expert again for each of its pairs. Measured on an H200 in
microseconds, one by one and sorted: one token of DeepSeek-V2-Lite 32 and 36, of Qwen3-Next 20 and
23; two tokens with their shared experts 63 and 65, 37 and 37, four 109 and 109, 57 and 52.
"""

MAX_PART_PAIRS = 3 << 15
"""Bounds the memory between the products: more pairs are computed in parts of whole tokens."""

GATED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def fused_experts(
    out: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    intermediate_size: int,
    activation: str,
) -> None:
    """See the door; stacks are plain, [N, 2 I, E] and [N, E, I]."""
    op = "fused_experts"
    if activation not in GATED_ACTIVATIONS:
        raise ShapeError(
            f"{op}: activation is {activation!r}, allowed: " + ", ".join(GATED_ACTIVATIONS)
        )
    inner = Product(
        weight=w13,
        bias=None,
        num_outputs=intermediate_size,
        up_offset=intermediate_size,
        activation=activation,
    )
    _run(op, out, x, inner, w2, None, topk_weights, topk_ids)


def fused_biased_experts(
    out: Tensor,
    x: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    alpha: float,
    limit: float,
) -> None:
    """See the door."""
    inner = Product(
        weight=gate_up,
        bias=gate_up_bias,
        num_outputs=gate_up.shape[1] // 2,
        row_step=2,
        up_offset=1,
        activation="clamped",
        alpha=alpha,
        limit=limit,
    )
    _run("fused_biased_experts", out, x, inner, down, down_bias, topk_weights, topk_ids)


def fused_relu2_experts(
    out: Tensor, x: Tensor, up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor
) -> None:
    """See the door."""
    inner = Product(weight=up, bias=None, num_outputs=up.shape[1], activation="relu2")
    _run("fused_relu2_experts", out, x, inner, down, None, topk_weights, topk_ids)


def _run(
    op: str,
    out: Tensor,
    x: Tensor,
    inner: Product,
    down: Tensor,
    down_bias: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
) -> None:
    _check(op, out, x, inner, down, down_bias, topk_weights, topk_ids)
    outer = Product(weight=down, bias=down_bias, num_outputs=out.shape[1])
    num_chosen = topk_ids.shape[1]
    part_tokens = max(1, MAX_PART_PAIRS // num_chosen)
    for first in range(0, x.shape[0], part_tokens):
        part = slice(first, first + part_tokens)
        run_part(out[part], x[part], inner, outer, topk_weights[part], topk_ids[part])


def run_part(
    out: Tensor, x: Tensor, inner: Product, outer: Product, topk_weights: Tensor, topk_ids: Tensor
) -> None:
    """Run so many tokens that what lies between the products fits in memory."""
    strip = choose_strip()
    if x.shape[0] <= MAX_SINGLE_TOKENS and fits_counters(out.shape[0], out.shape[1], strip):
        run_single(out, x, inner, outer, topk_weights, topk_ids, strip)
        return
    tile = choose_tile(x, topk_ids.numel() / inner.weight.shape[0])
    run_grouped(out, x, inner, outer, topk_weights, topk_ids, tile)


def run_single(
    out: Tensor,
    x: Tensor,
    inner: Product,
    outer: Product,
    topk_weights: Tensor,
    topk_ids: Tensor,
    strip: Strip,
) -> None:
    """Take pairs one by one in a given form; benchmarks and tests choose it."""
    hidden = multiply_single(inner, x, topk_ids, strip, is_first=True)
    multiply_single(
        outer, hidden, topk_ids, strip, is_first=False, topk_weights=topk_weights, total=out
    )


def run_grouped(
    out: Tensor,
    x: Tensor,
    inner: Product,
    outer: Product,
    topk_weights: Tensor,
    topk_ids: Tensor,
    tile: Tile,
) -> None:
    """Sort pairs and multiply them in a given form; benchmarks and tests choose it."""
    num_experts, num_chosen = inner.weight.shape[0], topk_ids.shape[1]
    routing = sort_pairs(topk_ids, num_experts, tile.block_m)
    hidden = multiply_grouped(inner, x, num_chosen, routing, tile, is_first=True)
    parts = multiply_grouped(outer, hidden, num_chosen, routing, tile, is_first=False)
    sum_choices(out, parts, topk_weights, topk_ids, num_experts)


def _check(
    op: str,
    out: Tensor,
    x: Tensor,
    inner: Product,
    down: Tensor,
    down_bias: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
) -> None:
    num_experts = inner.weight.shape[0]
    num_rows = inner.num_outputs * (2 if inner.is_gated else 1)
    expected = {
        "out": (out, tuple(x.shape), x.dtype),
        "the first stack": (inner.weight, (num_experts, num_rows, x.shape[-1]), x.dtype),
        "the second stack": (down, (num_experts, x.shape[-1], inner.num_outputs), x.dtype),
        "topk_weights": (topk_weights, tuple(topk_ids.shape), torch.float32),
        "topk_ids": (topk_ids, (x.shape[0], topk_ids.shape[-1]), torch.int32),
    }
    if inner.bias is not None:
        expected["the first bias"] = (inner.bias, (num_experts, num_rows), x.dtype)
    if down_bias is not None:
        expected["the second bias"] = (down_bias, (num_experts, x.shape[-1]), x.dtype)
    for name, (tensor, shape, dtype) in expected.items():
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ShapeError(
                f"{op}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} "
                f"{list(shape)}"
            )
        if name != "out" and not tensor.is_contiguous():
            raise ShapeError(f"{op}: {name} must be contiguous")
    if x.dim() != 2 or x.stride(1) != 1 or out.stride(1) != 1:
        raise ShapeError(f"{op}: x and out must be matrices with contiguous rows")


OPS = {
    "fused_experts": fused_experts,
    "fused_biased_experts": fused_biased_experts,
    "fused_relu2_experts": fused_relu2_experts,
}
SCHEMAS: dict[str, str] = {}
