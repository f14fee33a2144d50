"""Activations of MLPs.

Built by `models/blocks.py`; the arithmetic is `_custom_ops/activation.py`. `GATED_ACTIVATIONS` is
the table from the names of checkpoints to ops.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vllm._custom_ops import activation as activation_ops
from vllm.errors import ConfigError

GATED_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""hidden_act of a checkpoint -> the name that our ops use."""


class SiluAndMul(nn.Module):
    """silu(first half) * second half."""

    def forward(self, x_TI: Tensor) -> Tensor:
        """Return [T, I / 2]."""
        out = x_TI.new_empty(*x_TI.shape[:-1], x_TI.shape[-1] // 2)
        activation_ops.silu_and_mul(out, x_TI)
        return out


class GeluAndMul(nn.Module):
    """gelu(first half) * second half, exact ("none") or by tanh ("tanh")."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ConfigError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
        self._op = (
            activation_ops.gelu_tanh_and_mul
            if approximate == "tanh"
            else activation_ops.gelu_and_mul
        )

    def forward(self, x_TI: Tensor) -> Tensor:
        """Return [T, I / 2]."""
        out = x_TI.new_empty(*x_TI.shape[:-1], x_TI.shape[-1] // 2)
        self._op(out, x_TI)
        return out


def resolve_gated_activation(name: str) -> str:
    """Return our name ("silu", "gelu" or "gelu_tanh") of a checkpoint's hidden_act.

    Raises:
        ConfigError: an activation that no gated op computes.
    """
    if name not in GATED_ACTIVATIONS:
        raise ConfigError(
            f"hidden_act {name!r} is not supported in a gated MLP; allowed: "
            + ", ".join(GATED_ACTIVATIONS)
        )
    return GATED_ACTIVATIONS[name]


def make_gated_activation(name: str) -> nn.Module:
    """Return the module for one of our names."""
    if name == "silu":
        return SiluAndMul()
    return GeluAndMul("tanh" if name == "gelu_tanh" else "none")


def relu2(x: Tensor) -> Tensor:
    """Return relu(x) ** 2, rounded once; on a GPU in the memory of `x`."""
    if x.is_cuda:
        activation_ops.relu2(x, x)
        return x
    return torch.relu(x).square()


class _Elementwise(nn.Module):
    def __init__(self, op: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._op = op

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._op(out, x)
        return out


_PLAIN_ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "gelu_new": activation_ops.gelu_new,
    "gelu_pytorch_tanh": activation_ops.gelu_new,
    "gelu_fast": activation_ops.gelu_fast,
    "quick_gelu": activation_ops.gelu_quick,
}


def get_act_fn(name: str) -> nn.Module:
    """Return an activation without a gate, for MLPs of two matrices.

    Args:
        name: hidden_act of the checkpoint.

    Raises:
        ConfigError: an activation that no op computes.
    """
    if name == "relu":
        return nn.ReLU()
    if name not in _PLAIN_ACTIVATIONS:
        raise ConfigError(
            f"activation {name!r} is not supported; allowed: relu, " + ", ".join(_PLAIN_ACTIVATIONS)
        )
    return _Elementwise(_PLAIN_ACTIVATIONS[name])
