"""What one product of a mixture is, and what follows it. Triton.

Used by `moe_single.py` and `moe_grouped.py`, the forms of a product. Each pair's result is stored
by itself; a token's results are added up in the order of its choices, in float32. Ids that are no
expert's count for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm._custom_ops.triton.product import activate
from vllm.utils.math import cdiv

_SUM_COLUMNS = 1024


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


@triton.jit
def _add_bias(sums, bias, expert, rows_N, stride, is_in_N):
    if bias is not None:
        places = bias + expert.to(tl.int64) * stride + rows_N
        sums += tl.load(places, mask=is_in_N, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit
def finish(
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
def sum_token(parts, weights, ids, num_chosen, num_experts, stride, columns, is_in):
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
@triton.jit
def _sum_kernel(
    out,
    parts,
    weights,
    ids,
    N,
    out_stride,
    num_chosen,
    num_experts,
    BLOCK_N: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_in = columns < N
    first = token * num_chosen
    sums = sum_token(
        parts + first.to(tl.int64) * N, weights + first, ids + first, num_chosen, num_experts, N,
        columns, is_in,
    )  # fmt: skip
    places = out + token.to(tl.int64) * out_stride + columns
    tl.store(places, sums.to(out.dtype.element_ty), mask=is_in)


def sum_choices(
    out: Tensor, parts: Tensor, topk_weights: Tensor, ids_TK: Tensor, num_experts: int
) -> None:
    """Write the weighted sums of `parts` [T k, N] of each token to `out` [T, N]."""
    num_tokens, n = out.shape
    is_overlapped = overlaps(out.device)
    _sum_kernel[(num_tokens, cdiv(n, _SUM_COLUMNS))](
        out,
        parts,
        topk_weights,
        ids_TK,
        n,
        out.stride(0),
        ids_TK.shape[1],
        num_experts,
        BLOCK_N=_SUM_COLUMNS,
        OVERLAPS=is_overlapped,
        launch_pdl=is_overlapped,
    )
