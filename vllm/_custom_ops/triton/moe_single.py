"""The rows of few (token, expert) pairs by their experts' matrices, one by one. Triton.

Called by `moe.py` for one token. Programs stream the rows of a pair's expert; the last pair of
a token to arrive adds up the token's results.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.arrival import NUM_COUNTERS, get_counters, is_last_to_arrive
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.moe_product import Product, finish, sum_token
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm._custom_ops.triton.product import (
    multiply_tile,
)
from vllm.utils.math import cdiv, next_power

_TILE_ROWS = 16
"""Rows of a tile of which one is the pair's."""

_LEAST_K = 16
"""Less is no product for tensor cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """How a single pair's product runs.

    Attributes:
        block_n: weight rows of a program, gate and up together.
        block_k: elements of K that are on their way together, of two bytes each.
        num_stages: tiles that are on their way at once.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


_STRIP = Strip(block_n=64, block_k=128, num_warps=4, num_stages=4)


def choose_strip() -> Strip:
    """Return how to multiply single pairs."""
    return _STRIP


@fast_launch
@triton.jit(do_not_specialize=["alpha", "limit"])
def _single_kernel(
    out,
    x,
    weight,
    bias,
    ids,
    N,
    K,
    x_stride,
    num_experts,
    expert_rows,
    row_step,
    up_offset,
    rows_of_x,
    alpha,
    limit,
    topk_weights,
    total,
    total_stride,
    num_chosen,
    counters,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply one pair's row; where `total` is given, the last pair of a token adds them up."""
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    pair, tile = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + pair)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_in = columns < N
    if (expert >= 0) & (expert < num_experts):
        rows = tl.minimum(columns, N - 1) * row_step
        matrix = weight + expert.to(tl.int64) * expert_rows * K
        start = (pair // rows_of_x).to(tl.int64) * x_stride
        is_row = tl.arange(0, BLOCK_M) == 0
        starts = start + tl.zeros((BLOCK_M,), tl.int64)
        gate, up = multiply_tile(
            x, starts, is_row, matrix, rows, rows + up_offset, 0, K, K,
            IS_GATED, False, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        result = finish(
            gate, up, bias, expert, rows, rows + up_offset, expert_rows, is_in, alpha, limit,
            x.dtype.element_ty, ACTIVATION,
        )  # fmt: skip
        places = out + pair.to(tl.int64) * N + columns[None, :] + tl.zeros((BLOCK_M, 1), tl.int32)
        tl.store(places, result, mask=is_row[:, None] & is_in[None, :])
    if total is not None:
        token = pair // num_chosen
        if is_last_to_arrive(counters + token * tl.num_programs(1) + tile, num_chosen):
            first = token * num_chosen
            sums = sum_token(
                out + first.to(tl.int64) * N, topk_weights + first, ids + first, num_chosen,
                num_experts, N, columns, is_in,
            )  # fmt: skip
            places = total + token.to(tl.int64) * total_stride + columns
            tl.store(places, sums.to(total.dtype.element_ty), mask=is_in)


def fits_counters(num_tokens: int, num_outputs: int, strip: Strip) -> bool:
    """Whether `multiply_single` can add up the results of so many tokens."""
    return num_tokens * cdiv(num_outputs, strip.block_n) <= NUM_COUNTERS


def multiply_single(
    product: Product,
    x: Tensor,
    ids_TK: Tensor,
    strip: Strip,
    *,
    is_first: bool,
    topk_weights: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """Multiply every pair's row by its expert, one by one.

    Rows of `x` are tokens' if `is_first`, else pairs'. Where `total` [T, outputs] is given it gets
    the sums of the tokens' results, weighted by `topk_weights`.

    Returns:
        [P, outputs]; rows of ids that are no expert's are not written.
    """
    num_experts, expert_rows, k = product.weight.shape
    n, num_pairs, num_chosen = product.num_outputs, ids_TK.numel(), ids_TK.shape[1]
    block_n = strip.block_n // 2 if product.is_gated else strip.block_n
    wanted_k = strip.block_k * 2 // x.element_size()
    block_k = max(_LEAST_K, min(wanted_k, next_power(k)))
    out = x.new_empty(num_pairs, n)
    is_overlapped = overlaps(x.device)
    _single_kernel[(num_pairs, cdiv(n, block_n))](
        out,
        x,
        product.weight,
        product.bias,
        ids_TK,
        n,
        k,
        x.stride(0),
        num_experts,
        expert_rows,
        product.row_step,
        product.up_offset,
        num_chosen if is_first else 1,
        product.alpha,
        product.limit,
        topk_weights,
        total,
        0 if total is None else total.stride(0),
        num_chosen,
        get_counters(x.device),
        ACTIVATION=product.activation,
        IS_GATED=product.is_gated,
        EVEN_K=k % block_k == 0,
        BLOCK_M=_TILE_ROWS,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        OVERLAPS=is_overlapped,
        launch_pdl=is_overlapped,
        num_warps=strip.num_warps,
        num_stages=strip.num_stages,
    )
    return out
