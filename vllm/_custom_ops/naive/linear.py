"""Linear ops in plain PyTorch: the twins of `_custom_ops/linear.py`.

Read by tests and by anyone who wants to know what the ops mean. Never called by the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm._custom_ops.naive import activation as activations

BLOCK_COLUMNS = 32


def packed_shape(n: int, k: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of a packed [n, k] weight."""
    blocks = -(-n // BLOCK_COLUMNS)
    pairs = () if dtype == torch.float32 else (2,)
    return (blocks, -(-k // 2) if pairs else k, BLOCK_COLUMNS, *pairs)


def empty_packed(n: int, k: int, dtype: torch.dtype, *, count: int | None = None) -> Tensor:
    """Return memory for packed weights."""
    shape = packed_shape(n, k, dtype)
    return torch.empty(shape if count is None else (count, *shape), dtype=dtype)


def empty_output(num_rows: int, n: int, dtype: torch.dtype) -> Tensor:
    """Return memory for the results of `linear`."""
    return torch.empty(num_rows, n, dtype=dtype)


def pack_linear_weight(weight_NK: Tensor, out: Tensor | None = None) -> Tensor:
    """Pad to whole blocks (and pairs of k), then put k before the columns of a block."""
    n, k = weight_NK.shape
    shape = packed_shape(n, k, weight_NK.dtype)
    step = 1 if weight_NK.dtype == torch.float32 else 2
    padded = weight_NK.new_zeros(shape[0] * BLOCK_COLUMNS, shape[1] * step)
    padded[:n, :k] = weight_NK
    packed = padded.view(shape[0], BLOCK_COLUMNS, shape[1], step).transpose(1, 2).reshape(shape)
    return packed if out is None else out.copy_(packed)


def pack_weight_stack(weight_CNK: Tensor) -> Tensor:
    """Pack each matrix of a stack."""
    return torch.stack([pack_linear_weight(weight_NK) for weight_NK in weight_CNK])


def unpack_linear_weight(packed: Tensor, n: int, k: int) -> Tensor:
    """Undo `pack_linear_weight`."""
    blocks, steps = packed.shape[:2]
    plain = packed.view(blocks, steps, BLOCK_COLUMNS, -1).transpose(1, 2)
    return plain.reshape(blocks * BLOCK_COLUMNS, -1)[:n, :k].contiguous()


def linear(out_TN: Tensor, input_TK: Tensor, packed: Tensor, bias_N: Tensor | None = None) -> None:
    """out = input · Wᵀ + bias, in float32, rounded once to the input's dtype."""
    weight_NK = unpack_linear_weight(packed, out_TN.shape[1], input_TK.shape[1])
    product = input_TK.float() @ weight_NK.float().T
    if bias_N is not None:
        product += bias_N.float()
    out_TN.copy_(product.to(input_TK.dtype))


def embedding(out_TK: Tensor, ids_T: Tensor, packed: Tensor) -> None:
    """Gather rows of the unpacked matrix."""
    out_TK.copy_(unpack_linear_weight(packed, packed.shape[0] * 32, out_TK.shape[1])[ids_T])


def skinny_linear(
    out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None
) -> None:
    """out = x · Wᵀ + bias, in float32, rounded once to the input's dtype."""
    product = x_TK.float() @ weight_NK.float().T
    if bias_N is not None:
        product += bias_N.float()
    out_TN.copy_(product.to(x_TK.dtype))


def skinny_gated_linear(
    out_TI: Tensor, x_TK: Tensor, weight_2IK: Tensor, bias_2I: Tensor | None, activation: str
) -> None:
    """Gate and up in one product, rounded; then the activation of one times the other."""
    gate_up = x_TK.new_empty(x_TK.shape[0], weight_2IK.shape[0])
    skinny_linear(gate_up, x_TK, weight_2IK, bias_2I)
    getattr(activations, f"{activation}_and_mul")(out_TI, gate_up)


def skinny_relu2_linear(
    out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None
) -> None:
    """The product, rounded; then relu2."""
    product = torch.empty_like(out_TN)
    skinny_linear(product, x_TK, weight_NK, bias_N)
    activations.relu2(out_TN, product)


def skinny_linear_parts(parts_PTN: Tensor, x_TK: Tensor, weight_NK: Tensor) -> None:
    """Products of equal cuts of K, float32; the kernels cut where their tiles end."""
    width = -(-x_TK.shape[1] // parts_PTN.shape[0])
    for i, part_TN in enumerate(parts_PTN):
        k = slice(i * width, (i + 1) * width)
        part_TN.copy_(x_TK[:, k].float() @ weight_NK[:, k].float().T)


def sum_parts(parts_PTN: Tensor) -> Tensor:
    """Return what parts add up to in their order, float32 [T, N]."""
    total_TN = parts_PTN[0].clone()
    for part_TN in parts_PTN[1:]:
        total_TN += part_TN
    return total_TN
