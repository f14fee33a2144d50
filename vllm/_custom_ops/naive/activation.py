"""Activations in plain PyTorch: the twins of `_custom_ops/activation.py`.

Read by tests and by anyone who wants to know what the ops mean. Never called by the engine.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    """silu(first half) * second half; the activation is rounded before the product."""
    gate, up = input.chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


def gelu_and_mul(out: Tensor, input: Tensor) -> None:
    """gelu(first half) * second half, exact (erf) form."""
    gate, up = input.chunk(2, dim=-1)
    out.copy_(F.gelu(gate) * up)


def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    """gelu(first half) * second half, tanh form."""
    gate, up = input.chunk(2, dim=-1)
    out.copy_(F.gelu(gate, approximate="tanh") * up)


def gelu_new(out: Tensor, input: Tensor) -> None:
    """Tanh form of gelu, as GPT-2 has it."""
    x = input.float()
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x.pow(3))
    out.copy_((0.5 * x * (1.0 + torch.tanh(inner))).to(input.dtype))


def gelu_fast(out: Tensor, input: Tensor) -> None:
    """Tanh form of gelu with the constant of FastGELU."""
    x = input.float()
    inner = 0.7978845608 * x * (1.0 + 0.044715 * x * x)
    out.copy_((0.5 * x * (1.0 + torch.tanh(inner))).to(input.dtype))


def gelu_quick(out: Tensor, input: Tensor) -> None:
    """x * sigmoid(1.702 x)."""
    x = input.float()
    out.copy_((x * torch.sigmoid(1.702 * x)).to(input.dtype))


def relu2(out: Tensor, input: Tensor) -> None:
    """relu(x) ** 2."""
    out.copy_(torch.relu(input).square())


def mul_sigmoid(x: Tensor, gate: Tensor) -> None:
    """x := x * sigmoid(gate); the sigmoid is rounded before the product."""
    x.mul_(torch.sigmoid(gate.float()).to(x.dtype))


def add_gated(out_TE: Tensor, x_TE: Tensor, gate_T1: Tensor) -> None:
    """out := out + sigmoid(gate) * x; sigmoid, product and sum are each rounded."""
    out_TE.add_(torch.sigmoid(gate_T1.float()).to(x_TE.dtype) * x_TE)


def soft_cap(x: Tensor, scale: float, cap: float) -> None:
    """cap * tanh(x * scale / cap), in place."""
    x.copy_((torch.tanh(x.float() * scale / cap) * cap).to(x.dtype))
