"""The rows of some hundred (token, expert) pairs by their experts' matrices. Triton.

Called by `moe.py` for decode steps of many rows. There is a program for every expert and tile,
which looks through all pairs for its own: nothing has to be sorted before, and which weights a
program reads is known before any input is there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.moe_product import Product
from vllm._custom_ops.triton.moe_tile import Tile, can_describe, compute_tile, describe_weight
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm.utils.math import cdiv

MAX_PAIRS = 1024
"""More pairs are sorted."""

_CHUNK_PAIRS = 128
"""Pairs that a program looks at together."""


@triton.jit
def _find_pairs(
    ids,
    num_pairs,
    expert,
    first,
    ROWS: tl.constexpr,
    CHUNK_PAIRS: tl.constexpr,
):
    """Return the expert's pairs number `first` to `first` + ROWS - 1, and how many it has."""
    wanted = first + tl.arange(0, ROWS)
    pairs = tl.zeros((ROWS,), tl.int32)
    count = tl.zeros((), tl.int32)
    for start in range(0, num_pairs, CHUNK_PAIRS):
        lanes = start + tl.arange(0, CHUNK_PAIRS)
        is_own = tl.load(ids + lanes, mask=lanes < num_pairs, other=-1) == expert
        ranks = count + tl.cumsum(is_own.to(tl.int32), 0) - 1
        is_found = is_own[None, :] & (ranks[None, :] == wanted[:, None])
        pairs += tl.sum(tl.where(is_found, lanes[None, :], 0), 1)
        count += tl.sum(is_own.to(tl.int32), 0)
    return pairs, count


@fast_launch
@triton.jit(
    do_not_specialize=["alpha", "limit", "num_pairs"], do_not_specialize_on_alignment=["ids"]
)
def _scanned_kernel(
    out,
    x,
    weight,
    bias,
    ids,
    N,
    K,
    x_stride,
    expert_rows,
    row_step,
    up_offset,
    num_pairs,
    rows_of_x,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK_PAIRS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply the rows of an expert's pairs; those that every token takes are last and start."""
    let_next_start(OVERLAPS)
    expert = tl.num_programs(1) - 1 - tl.program_id(1)
    await_inputs(OVERLAPS)
    pairs, count = _find_pairs(ids, num_pairs, expert, 0, BLOCK_M, CHUNK_PAIRS)
    for first in range(0, count, BLOCK_M):
        is_row = first + tl.arange(0, BLOCK_M) < count
        result, outputs, is_in = compute_tile(
            x, pairs // rows_of_x, is_row, 0, weight, bias, expert,
            N, K, x_stride, expert_rows, row_step, up_offset, alpha, limit,
            ACTIVATION, IS_GATED, EVEN_K, PARTS, True, BLOCK_M, BLOCK_N, BLOCK_K,
            out.dtype.element_ty,
        )  # fmt: skip
        places = out + pairs[:, None].to(tl.int64) * N + outputs[None, :]
        tl.store(places, result, mask=is_row[:, None] & is_in[None, :])
        if first + BLOCK_M < count:
            pairs, _ = _find_pairs(ids, num_pairs, expert, first + BLOCK_M, BLOCK_M, CHUNK_PAIRS)


def multiply_scanned(
    product: Product, x: Tensor, ids_TK: Tensor, tile: Tile, *, is_first: bool
) -> Tensor:
    """Multiply the rows of up to MAX_PAIRS pairs by their experts.

    Rows of `x` are tokens' if `is_first`, else pairs'.

    Returns:
        [P, outputs]; rows of ids that are no expert's are not written.
    """
    num_experts, expert_rows, k = product.weight.shape
    n, num_pairs = product.num_outputs, ids_TK.numel()
    block_k = tile.block_k * 2 // x.element_size()
    weight, parts = product.weight, 0
    if can_describe(tile, x, k):
        weight, parts = describe_weight(product, tile, block_k)
    out = x.new_empty(num_pairs, n)
    is_overlapped = overlaps(x.device)
    num_tiles = cdiv(n * (2 if product.is_gated else 1), tile.block_n)
    _scanned_kernel[(num_tiles, num_experts)](
        out,
        x,
        weight,
        product.bias,
        ids_TK,
        n,
        k,
        x.stride(0),
        expert_rows,
        product.row_step,
        product.up_offset,
        num_pairs,
        ids_TK.shape[1] if is_first else 1,
        product.alpha,
        product.limit,
        ACTIVATION=product.activation,
        IS_GATED=product.is_gated,
        EVEN_K=k % block_k == 0,
        PARTS=parts,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        CHUNK_PAIRS=_CHUNK_PAIRS,
        OVERLAPS=is_overlapped,
        launch_pdl=is_overlapped,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
