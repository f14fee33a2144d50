"""Doors of the linear ops: packed weights, products with them, rows out of them.

Packed weights are a CPU's; on a GPU weights stay plain, and the `skinny_*` ops multiply few rows.

Called by `model_executor/layers/{linear,vocab_parallel_embedding}.py`. Naive twins:
`_custom_ops/naive/linear.py`. The compiled ops check their arguments; nothing here computes. The
result of a row depends on that row alone, bit for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vllm._custom_ops.library import C

BLOCK_COLUMNS = 32
"""Rows of W (columns of the product) that one packed block holds."""

LARGE_OUTPUT_BYTES = 1 << 20
"""From here on results lie in recycled memory."""


def packed_shape(n: int, k: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of a packed [n, k] weight.

    float32: [blocks, k, 32]; bfloat16: [blocks, ceil(k / 2), 32, 2], so that two neighbours in k
    lie in one 32-bit lane. Zero padded.
    """
    blocks = -(-n // BLOCK_COLUMNS)
    if dtype == torch.float32:
        return (blocks, k, BLOCK_COLUMNS)
    return (blocks, -(-k // 2), BLOCK_COLUMNS, 2)


def empty_packed(n: int, k: int, dtype: torch.dtype, *, count: int | None = None) -> Tensor:
    """Return uninitialised memory for one packed weight, or for a stack of `count` of them.

    It lies in huge pages, next to what was allocated before it: pack weights in the order in which
    a forward pass reads them.
    """
    shape = packed_shape(n, k, dtype)
    if count is not None:
        shape = (count, *shape)
    return C.empty_huge(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def empty_output(num_rows: int, n: int, dtype: torch.dtype) -> Tensor:
    """Return uninitialised memory for the results of `linear`, [num_rows, n].

    Large ones (logits) come from memory that earlier ones have left: fresh pages for every step
    would cost more than filling them.
    """
    num_bytes = num_rows * n * dtype.itemsize
    if num_bytes < LARGE_OUTPUT_BYTES:
        return torch.empty(num_rows, n, dtype=dtype)
    return C.empty_recycled(num_bytes).view(dtype).view(num_rows, n)


def pack_linear_weight(weight_NK: Tensor, out: Tensor | None = None) -> Tensor:
    """Pack a weight into the layout that `linear` streams.

    Args:
        weight_NK: float32 or bfloat16 [N, K], contiguous in K.
        out: memory of `packed_shape(N, K, dtype)`; allocated with `empty_packed` if None.

    Returns:
        The packed weight; N and K cannot be read off it exactly, keep them beside it.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    if out is None:
        out = empty_packed(weight_NK.shape[0], weight_NK.shape[-1], weight_NK.dtype)
    C.pack_linear_weight(out, weight_NK)
    return out


def pack_weight_stack(weight_CNK: Tensor) -> Tensor:
    """Pack each matrix of a stack; they lie behind each other.

    Args:
        weight_CNK: float32 or bfloat16 [C, N, K], of any strides.

    Returns:
        [C, *packed_shape(N, K, dtype)].
    """
    count, n, k = weight_CNK.shape
    packed = empty_packed(n, k, weight_CNK.dtype, count=count)
    for weight_NK, out in zip(weight_CNK, packed, strict=True):
        pack_linear_weight(weight_NK.contiguous(), out)
    return packed


def unpack_linear_weight(packed: Tensor, n: int, k: int) -> Tensor:
    """Return the plain [n, k] weight of a packed one.

    Raises:
        ShapeError: `packed` was not made from a weight of this shape.
    """
    weight_NK = torch.empty(n, k, dtype=packed.dtype)
    C.unpack_linear_weight(weight_NK, packed)
    return weight_NK


def linear(out_TN: Tensor, input_TK: Tensor, packed: Tensor, bias_N: Tensor | None = None) -> None:
    """Multiply rows by a packed weight: out = input · Wᵀ + bias.

    Sums run over K in rising order in float32, one accumulator an element.

    Args:
        out_TN: of the input's dtype, or float32: then the results are rounded to the input's dtype
            all the same (logits, as transformers rounds them). Contiguous in N.
        input_TK: float32 or bfloat16, contiguous in K.
        packed: from `pack_linear_weight`, of the input's dtype.
        bias_N: of the input's dtype, added before the rounding.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.

    Cost: reads the packed weight once for every 192 rows and row group of threads.
    """
    C.linear(out_TN, input_TK, packed, bias_N)


def embedding(out_TK: Tensor, ids_T: Tensor, packed: Tensor) -> None:
    """Gather rows of a packed matrix, so that a tied embedding is stored once.

    Args:
        out_TK: of the packed matrix's dtype, contiguous in K.
        ids_T: int64.
        packed: from `pack_linear_weight`.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype, or an id lies outside the
            (padded) matrix.
    """
    C.embedding(out_TK, ids_T, packed)


def skinny_linear(
    out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None
) -> None:
    """Multiply few rows by a plain weight on a GPU: out = x · Wᵀ + bias.

    Sums are float32; K may be summed in parts, whose number depends on the shapes alone.

    Args:
        out_TN: of the input's dtype, or float32: then the results are rounded to the input's dtype
            all the same. Contiguous in N.
        x_TK: at most 64 rows, contiguous in K.
        weight_NK: contiguous, of the input's dtype.
        bias_N: of the input's dtype, added before the rounding.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.

    Cost: reads the weight once.
    """
    C.skinny_linear(out_TN, x_TK, weight_NK, bias_N)


def skinny_gated_linear(
    out_TI: Tensor, x_TK: Tensor, weight_2IK: Tensor, bias_2I: Tensor | None, activation: str
) -> None:
    """Multiply few rows by gate and up weights on a GPU: out = act(x · Wgᵀ) * (x · Wuᵀ).

    Gate, up and the activated gate are rounded to the dtype, as by the single ops.

    Args:
        out_TI: of the input's dtype, contiguous in I.
        x_TK: at most 64 rows, contiguous in K.
        weight_2IK: contiguous, gate rows first.
        bias_2I: of the input's dtype, or None.
        activation: "silu", "gelu" or "gelu_tanh".

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype, or there is no such
            activation.
    """
    C.skinny_gated_linear(out_TI, x_TK, weight_2IK, bias_2I, activation)


def skinny_relu2_linear(
    out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None
) -> None:
    """Multiply few rows by a plain weight on a GPU: out = relu(x · Wᵀ + bias) ** 2.

    The product and its square are rounded to the dtype, as by the single ops.

    Args:
        out_TN: of the input's dtype, contiguous in N.
        x_TK: at most 64 rows, contiguous in K.
        weight_NK: contiguous, of the input's dtype.
        bias_N: of the input's dtype, added before the rounding.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.skinny_relu2_linear(out_TN, x_TK, weight_NK, bias_N)


def skinny_linear_parts(parts_PTN: Tensor, x_TK: Tensor, weight_NK: Tensor) -> None:
    """Multiply few rows by a plain weight on a GPU and leave the sums over parts of K.

    The sum of the parts in their order, float32, is x · Wᵀ; the kernel that reads it adds them up
    (`add_parts_rms_norm`, `qkv_norm_rope_cache`). Which element of K lies in which part depends on
    the shapes alone.

    Args:
        parts_PTN: float32, contiguous; `linear_table.count_parts` says how many run best.
        x_TK: at most 64 rows, contiguous in K.
        weight_NK: contiguous, of the input's dtype.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.

    Cost: reads the weight once.
    """
    C.skinny_linear_parts(parts_PTN, x_TK, weight_NK)
