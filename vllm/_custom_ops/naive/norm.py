"""Norms in plain PyTorch: the twins of `_custom_ops/norm.py`.

Read by tests and by anyone who wants to know what the ops mean. Never called by the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm._custom_ops.naive.linear import sum_parts


def rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    """Normalise by the root mean square in float32, then scale.

    A weight of the input's dtype multiplies the rounded value; a float32 weight over a narrower
    input multiplies before the only rounding.
    """
    x = input.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    if weight.dtype == input.dtype:
        out.copy_(x.to(input.dtype) * weight)
    else:
        out.copy_((x * weight).to(input.dtype))


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    """residual := input + residual, rounded; input := rms_norm(residual)."""
    residual.add_(input)
    rms_norm(input, residual, weight, epsilon)


def norm_add_rms_norm(
    input: Tensor, residual: Tensor, input_weight: Tensor, weight: Tensor, epsilon: float
) -> None:
    """input := rms_norm(input), rounded; then `fused_add_rms_norm`."""
    rms_norm(input, input, input_weight, epsilon)
    fused_add_rms_norm(input, residual, weight, epsilon)


def add_parts_rms_norm(
    out: Tensor, parts_PTN: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> None:
    """residual += sum of parts in their order, rounded; out := rms_norm(residual)."""
    residual.add_(sum_parts(parts_PTN).to(residual.dtype))
    rms_norm(out, residual, weight, epsilon)
