"""One product of a mixture: the rows of (token, expert) pairs by their expert's matrix. Triton.

Called by `moe.py`. Pairs are taken one by one, for decode steps, or in blocks of one expert that
`moe_routing.py` makes. Each pair's result is stored by itself; a token's results are added up in
the order of its choices, in float32. Ids that are no expert's count for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.moe_routing import Routing
from vllm._custom_ops.triton.product import (
    NUM_COUNTERS,
    activate,
    get_counters,
    is_last_to_arrive,
    multiply_row,
    multiply_tile,
)

_SINGLE_ROWS = 16
"""Weight rows of a program that takes one pair."""

_SINGLE_COLUMNS = 512
_SUM_COLUMNS = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Product:
    """One matrix and perhaps a bias for each expert, and what is done to its results.

    Attributes:
        weight: [N, rows, K], contiguous.
        bias: [N, rows] or None.
        num_outputs: elements of a result row, half of the rows if gated.
        row_step: weight rows from one output to the next; 2 where gate and up rows alternate.
        up_offset: weight rows from gate to up; 0 is not gated.
        activation: see `product.activate`; "" is none.
        alpha, limit: of the activation.
    """

    weight: Tensor
    bias: Tensor | None
    num_outputs: int
    row_step: int = 1
    up_offset: int = 0
    activation: str = ""
    alpha: float = 0.0
    limit: float = 0.0

    @property
    def is_gated(self) -> bool:
        """Whether two weight rows make one output."""
        return self.up_offset > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Block sizes of a grouped product; `block_n` counts weight rows, gate and up together."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


_TILES = (
    (16, Tile(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4)),
    (48, Tile(block_m=32, block_n=64, block_k=128, num_warps=4, num_stages=4)),
    (160, Tile(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4)),
)
_LARGEST_TILE = Tile(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3)


def choose_tile(rows_per_expert: float) -> Tile:
    """Return block sizes by how many rows an expert has if all have as many."""
    return next((tile for most, tile in _TILES if rows_per_expert <= most), _LARGEST_TILE)


@triton.jit
def _add_bias(sums, bias, expert, rows_N, stride, is_in_N):
    if bias is not None:
        places = bias + expert.to(tl.int64) * stride + rows_N
        sums += tl.load(places, mask=is_in_N, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit
def _finish(
    gate,
    up,
    bias,
    expert,
    rows_N,
    up_rows_N,
    stride,
    is_in_N,
    alpha,
    limit,
    ELEMENT: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Return a product's elements with bias, rounded, and activated if that is asked for."""
    result = _add_bias(gate, bias, expert, rows_N, stride, is_in_N).to(ELEMENT)
    if ACTIVATION != "":
        up = _add_bias(up, bias, expert, up_rows_N, stride, is_in_N).to(ELEMENT)
        result = activate(result, up, alpha, limit, ACTIVATION)
    return result


@triton.jit
def _sum_choices(parts, weights, ids, num_chosen, num_experts, stride, columns, is_in):
    """Return the weighted sum of a token's results; the three tables start at the token."""
    total = tl.zeros(columns.shape, tl.float32)
    for choice in range(num_chosen):
        expert = tl.load(ids + choice)
        is_valid = (expert >= 0) & (expert < num_experts)
        part = tl.load(
            parts + choice * stride + columns,
            mask=is_in & is_valid,
            other=0.0,
            cache_modifier=".cg",
        )
        weight = tl.load(weights + choice)
        total += tl.where(is_valid, weight, 0.0) * part.to(tl.float32)
    return total


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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply one pair's row; where `total` is given, the last pair of a token adds them up."""
    pair, tile = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + pair)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_in = columns < N
    if (expert >= 0) & (expert < num_experts):
        rows = tl.minimum(columns, N - 1) * row_step
        matrix = weight + expert.to(tl.int64) * expert_rows * K
        row = x + (pair // rows_of_x).to(tl.int64) * x_stride
        gate, up = multiply_row(
            row, matrix, rows, rows + up_offset, 0, K, K, IS_GATED, EVEN_K, BLOCK_N, BLOCK_K, 1
        )  # fmt: skip
        result = _finish(
            gate, up, bias, expert, rows, rows + up_offset, expert_rows, is_in, alpha, limit,
            x.dtype.element_ty, ACTIVATION,
        )  # fmt: skip
        places = out + pair.to(tl.int64) * N + columns
        tl.store(places[None, :], result, mask=is_in[None, :])
    if total is not None:
        token = pair // num_chosen
        if is_last_to_arrive(counters + token * tl.num_programs(1) + tile, num_chosen):
            first = token * num_chosen
            sums = _sum_choices(
                out + first.to(tl.int64) * N, topk_weights + first, ids + first, num_chosen,
                num_experts, N, columns, is_in,
            )  # fmt: skip
            places = total + token.to(tl.int64) * total_stride + columns
            tl.store(places, sums.to(total.dtype.element_ty), mask=is_in)


@fast_launch
@triton.jit(do_not_specialize=["alpha", "limit"])
def _grouped_kernel(
    out,
    x,
    weight,
    bias,
    order,
    ends,
    block_experts,
    block_starts,
    N,
    K,
    x_stride,
    expert_rows,
    row_step,
    up_offset,
    num_chosen,
    alpha,
    limit,
    IS_FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a block of one expert's rows: gathered by token if first, else in order."""
    tile, block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(block_experts + block)
    if expert >= 0:
        places = tl.load(block_starts + block) + tl.arange(0, BLOCK_M)
        is_row = places < tl.load(ends + expert)
        pairs = tl.load(order + places, mask=is_row, other=0)
        if IS_FIRST:
            x_rows, out_rows = pairs // num_chosen, places
        else:
            x_rows, out_rows = places, pairs
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_in = columns < N
        rows = tl.minimum(columns, N - 1) * row_step
        gate, up = multiply_tile(
            x, x_rows.to(tl.int64) * x_stride, is_row,
            weight + expert.to(tl.int64) * expert_rows * K, rows, rows + up_offset, 0, K, K,
            IS_GATED, False, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        result = _finish(
            gate, up, bias, expert, rows, rows + up_offset, expert_rows, is_in, alpha, limit,
            x.dtype.element_ty, ACTIVATION,
        )  # fmt: skip
        out_places = out + out_rows[:, None].to(tl.int64) * N + columns[None, :]
        tl.store(out_places, result, mask=is_row[:, None] & is_in[None, :])


@fast_launch
@triton.jit
def _sum_kernel(
    out, parts, weights, ids, N, out_stride, num_chosen, num_experts, BLOCK_N: tl.constexpr
):
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_in = columns < N
    first = token * num_chosen
    sums = _sum_choices(
        parts + first.to(tl.int64) * N, weights + first, ids + first, num_chosen, num_experts, N,
        columns, is_in,
    )  # fmt: skip
    places = out + token.to(tl.int64) * out_stride + columns
    tl.store(places, sums.to(out.dtype.element_ty), mask=is_in)


def fits_counters(num_tokens: int, num_outputs: int) -> bool:
    """Whether `multiply_single` can add up the results of so many tokens."""
    return num_tokens * triton.cdiv(num_outputs, _SINGLE_ROWS) <= NUM_COUNTERS


def multiply_single(
    product: Product,
    x: Tensor,
    ids_TK: Tensor,
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
    block_n = _SINGLE_ROWS // 2 if product.is_gated else _SINGLE_ROWS
    block_k = min(_SINGLE_COLUMNS, max(16, triton.next_power_of_2(k)))
    out = x.new_empty(num_pairs, n)
    _single_kernel[(num_pairs, triton.cdiv(n, block_n))](
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
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )
    return out


def multiply_grouped(
    product: Product, x: Tensor, num_chosen: int, routing: Routing, tile: Tile, *, is_first: bool
) -> Tensor:
    """Multiply the sorted pairs' rows by their experts.

    Rows of `x` are tokens' if `is_first`, else pairs' in sorted order.

    Returns:
        [P, outputs], in sorted order if `is_first`, else in the order of the pairs.
    """
    _, expert_rows, k = product.weight.shape
    n, num_pairs = product.num_outputs, routing.order.shape[0]
    block_n = tile.block_n // 2 if product.is_gated else tile.block_n
    block_k = tile.block_k * 2 // x.element_size()
    out = x.new_empty(num_pairs, n)
    _grouped_kernel[(triton.cdiv(n, block_n), routing.max_blocks)](
        out,
        x,
        product.weight,
        product.bias,
        routing.order,
        routing.ends,
        routing.block_experts,
        routing.block_starts,
        n,
        k,
        x.stride(0),
        expert_rows,
        product.row_step,
        product.up_offset,
        num_chosen,
        product.alpha,
        product.limit,
        IS_FIRST=is_first,
        ACTIVATION=product.activation,
        IS_GATED=product.is_gated,
        EVEN_K=k % block_k == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def sum_choices(
    out: Tensor, parts: Tensor, topk_weights: Tensor, ids_TK: Tensor, num_experts: int
) -> None:
    """Write the weighted sums of `parts` [T k, N] of each token to `out` [T, N]."""
    num_tokens, n = out.shape
    _sum_kernel[(num_tokens, triton.cdiv(n, _SUM_COLUMNS))](
        out,
        parts,
        topk_weights,
        ids_TK,
        n,
        out.stride(0),
        ids_TK.shape[1],
        num_experts,
        BLOCK_N=_SUM_COLUMNS,
    )
