"""The rows of sorted (token, expert) pairs by their experts' matrices, in tiles. Triton.

Called by `moe.py` for more pairs than `moe_single.py` takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm._custom_ops.triton.device import holds_hopper_tiles
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.moe_product import Product
from vllm._custom_ops.triton.moe_routing import Routing
from vllm._custom_ops.triton.moe_tile import Tile, can_describe, compute_tile, describe_weight
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm.utils.math import cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles:
    """The tiles of a kind of GPU.

    Attributes:
        few: for no more tokens than its rows, so that each expert has one block at most.
        some: for up to _SOME_ROWS rows of an expert.
        many: for more.
    """

    few: Tile
    some: Tile
    many: Tile


_BEFORE_HOPPER = _Tiles(
    few=Tile(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4),
    some=Tile(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4, small_m=16),
    many=Tile(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3, small_m=64),
)
_ON_HOPPER = _Tiles(
    few=replace(_BEFORE_HOPPER.few, block_n=128, num_stages=3, has_descriptors=True),
    some=replace(_BEFORE_HOPPER.some, has_descriptors=True),
    many=replace(_BEFORE_HOPPER.many, block_n=256, has_descriptors=True),
)

_SOME_ROWS = 80

_NARROW_BYTES = 2
"""Of elements that tensor cores multiply; float32 takes registers that larger tiles leave not."""


def choose_tile(x: Tensor, rows_per_expert: float) -> Tile:
    """Return how to multiply tokens' rows `x` [T, K].

    How many rows an expert really has is known on the device alone: decode steps of trained models
    and of made-up weights spread them unlike each other. So that no weight is read twice where 64
    tokens choose alike, and little is computed for nothing where each expert has six of them,
    experts of few pairs take a small tile. Microseconds on an H200, DeepSeek-V2-Lite (with its
    shared experts but for 8,192 tokens), tokens spread evenly and alike:

        tokens            8           64           256          8,192
        16 x 64       166  47      288  94      442  312            –
        64 x 128      172  47      282  50      308  101    2,212  2,171
        128 x 128       –            –            –         1,870  1,742
        128 x 256       –            –            –         1,657  1,483

    What bounds many rows is how fast L2 brings them: a larger tile reads less, and only Hopper's
    copy engine leaves it registers enough.

    Args:
        x: the rows of the first product.
        rows_per_expert: how many an expert has if all have as many.
    """
    is_narrow = x.itemsize == _NARROW_BYTES
    tiles = _ON_HOPPER if is_narrow and holds_hopper_tiles(x.device) else _BEFORE_HOPPER
    if x.shape[0] <= tiles.few.block_m:
        return tiles.few
    return tiles.many if is_narrow and rows_per_expert > _SOME_ROWS else tiles.some


@triton.jit
def _run_block(
    out,
    x,
    weight,
    bias,
    order,
    expert,
    start,
    end,
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
    PARTS: tl.constexpr,
    IS_X_GATHERED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    places = start + tl.arange(0, BLOCK_M)
    is_row = places < end
    pairs = tl.load(order + places, mask=is_row, other=0)
    if IS_FIRST:
        x_rows, out_rows = pairs // num_chosen, places
    else:
        x_rows, out_rows = places, pairs
    result, outputs, is_in = compute_tile(
        x, x_rows, is_row, start, weight, bias, expert,
        N, K, x_stride, expert_rows, row_step, up_offset, alpha, limit,
        ACTIVATION, IS_GATED, EVEN_K, PARTS, IS_X_GATHERED, BLOCK_M, BLOCK_N, BLOCK_K,
        out.dtype.element_ty,
    )  # fmt: skip
    out_places = out + out_rows[:, None].to(tl.int64) * N + outputs[None, :]
    tl.store(out_places, result, mask=is_row[:, None] & is_in[None, :])


@fast_launch
@triton.jit(
    do_not_specialize=["alpha", "limit"],
    do_not_specialize_on_alignment=["order", "ends", "block_experts", "block_starts"],
)
def _grouped_kernel(
    out,
    x,
    x_tiles,
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
    PARTS: tl.constexpr,
    SMALL_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply a block of one expert's rows: gathered by token if first, else in order.

    `x_tiles` is a descriptor of `x` or None.
    """
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    block = tl.program_id(1)
    expert = tl.load(block_experts + block)
    if expert >= 0:
        start = tl.load(block_starts + block)
        end = tl.load(ends + expert)
        # By the expert's count, not the block's: which pairs its last block has is left to chance.
        first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        if SMALL_M > 0 and end - first <= SMALL_M:
            _run_block(
                out, x, weight, bias, order, expert, start, end, N, K, x_stride, expert_rows,
                row_step, up_offset, num_chosen, alpha, limit, IS_FIRST, ACTIVATION, IS_GATED,
                EVEN_K, PARTS, True, SMALL_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        elif x_tiles is None:
            _run_block(
                out, x, weight, bias, order, expert, start, end, N, K, x_stride, expert_rows,
                row_step, up_offset, num_chosen, alpha, limit, IS_FIRST, ACTIVATION, IS_GATED,
                EVEN_K, PARTS, True, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _run_block(
                out, x_tiles, weight, bias, order, expert, start, end, N, K, x_stride, expert_rows,
                row_step, up_offset, num_chosen, alpha, limit, IS_FIRST, ACTIVATION, IS_GATED,
                EVEN_K, PARTS, False, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


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
    block_k = tile.block_k * 2 // x.element_size()
    weight, parts, x_tiles = product.weight, 0, None
    if can_describe(tile, x, k):
        weight, parts = describe_weight(product, tile, block_k)
        if not is_first:
            x_tiles = TensorDescriptor.from_tensor(x, [tile.block_m, block_k])
    out = x.new_empty(num_pairs, n)
    is_overlapped = overlaps(x.device)
    num_tiles = cdiv(n * (2 if product.is_gated else 1), tile.block_n)
    _grouped_kernel[(num_tiles, routing.max_blocks)](
        out,
        x,
        x_tiles,
        weight,
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
        PARTS=parts,
        SMALL_M=tile.small_m,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        OVERLAPS=is_overlapped,
        launch_pdl=is_overlapped,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
