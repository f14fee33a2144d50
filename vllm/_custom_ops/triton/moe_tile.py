"""A tile of one expert's results: rows of tokens or pairs by rows of the expert's matrix. Triton.

Used by `moe_grouped.py`. Gate and up rows lie side by side in one operand, so that the tensor cores
read the tokens' rows once for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm._custom_ops.triton.moe_product import Product, finish

_DESCRIPTOR_BYTES = 16
"""What a descriptor's rows must be multiples of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a product runs whose rows share their expert.

    Attributes:
        block_m: pairs of a program.
        block_n: weight rows of a program, gate and up together.
        block_k: elements of K that are on their way together, of two bytes each.
        num_stages: tiles that are on their way at once.
        has_descriptors: whether the copy engine of Hopper brings what is not gathered.
        small_m: blocks of up to so many pairs are multiplied in a tile of so many; 0 is none.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    has_descriptors: bool = False
    small_m: int = 0


@triton.jit
def _locate_rows(columns, N, row_step, up_offset, IS_GATED: tl.constexpr):
    if IS_GATED:
        rows = tl.minimum(columns // 2, N - 1) * row_step + (columns % 2) * up_offset
    else:
        rows = tl.minimum(columns, N - 1)
    return rows


@triton.jit
def _multiply(
    x,
    x_rows,
    is_row,
    start,
    weight,
    expert,
    columns,
    N,
    K,
    x_stride,
    expert_rows,
    row_step,
    up_offset,
    IS_GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    PARTS: tl.constexpr,
    IS_X_GATHERED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the products of a block's rows with `columns`' weight rows, [M, N].

    PARTS is 0 if `weight` is a pointer, else that of its descriptor [parts, rows, K]. `x` is a
    descriptor too if its rows are not gathered.
    """
    lanes = tl.arange(0, BLOCK_K)
    if PARTS == 0:
        rows = _locate_rows(columns, N, row_step, up_offset, IS_GATED)
        places = weight + expert.to(tl.int64) * expert_rows * K
        places += rows[:, None].to(tl.int64) * K + lanes[None, :]
    if IS_X_GATHERED:
        x_places = x + x_rows[:, None].to(tl.int64) * x_stride + lanes[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        is_in = (first + lanes < K)[None, :]
        if not IS_X_GATHERED:
            x_MK = x.load([start, first])
        elif EVEN_K:
            x_MK = tl.load(x_places + first, mask=is_row[:, None], other=0.0)
        else:
            x_MK = tl.load(x_places + first, mask=is_row[:, None] & is_in, other=0.0)
        if PARTS > 0:
            row = tl.program_id(0) * (BLOCK_N // PARTS)
            w_NK = weight.load([expert * PARTS, row, first]).reshape(BLOCK_N, BLOCK_K)
        elif EVEN_K:
            w_NK = tl.load(places + first)
        else:
            w_NK = tl.load(places + first, mask=is_in, other=0.0)
        sums = tl.dot(x_MK, tl.trans(w_NK), sums, input_precision="ieee")
    return sums


@triton.jit
def compute_tile(
    x,
    x_rows,
    is_row,
    start,
    weight,
    bias,
    expert,
    N,
    K,
    x_stride,
    expert_rows,
    row_step,
    up_offset,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    PARTS: tl.constexpr,
    IS_X_GATHERED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """Return results of one expert for a block of rows and program_id(0)'s outputs; [M, outputs].

    Args as in `_multiply`; also returns the outputs and whether they are some.
    """
    tile = tl.program_id(0)
    sums = _multiply(
        x, x_rows, is_row, start, weight, expert, tile * BLOCK_N + tl.arange(0, BLOCK_N), N, K,
        x_stride, expert_rows, row_step, up_offset,
        IS_GATED, EVEN_K, PARTS, IS_X_GATHERED, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    WIDTH: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    if not IS_GATED:
        gate, up = sums, sums
    elif PARTS == 2:  # gate rows, then up rows
        gate, up = tl.split(tl.permute(tl.reshape(sums, (BLOCK_M, 2, WIDTH)), (0, 2, 1)))
    else:  # gate 0, up 0, gate 1, up 1 ...
        gate, up = tl.split(tl.reshape(sums, (BLOCK_M, WIDTH, 2)))
    outputs = tile * WIDTH + tl.arange(0, WIDTH)
    is_in = outputs < N
    rows = tl.minimum(outputs, N - 1) * row_step
    result = finish(
        gate, up, bias, expert, rows, rows + up_offset, expert_rows, is_in, alpha, limit,
        ELEMENT, ACTIVATION,
    )  # fmt: skip
    return result, outputs, is_in


def can_describe(tile: Tile, x: Tensor, k: int) -> bool:
    """Whether the tile is to have descriptors and rows of k elements may have them."""
    return tile.has_descriptors and k * x.element_size() % _DESCRIPTOR_BYTES == 0


def describe_weight(product: Product, tile: Tile, block_k: int) -> tuple[TensorDescriptor, int]:
    """Return a descriptor of all experts' rows, [experts * parts, rows, K], and its parts."""
    weight = product.weight
    parts = 2 if product.is_gated and product.row_step == 1 else 1
    num_experts, rows, k = weight.shape
    view = weight.view(num_experts * parts, rows // parts, k)
    return TensorDescriptor.from_tensor(view, [parts, tile.block_n // parts, block_k]), parts
