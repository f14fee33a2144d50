"""Doors of the activation ops: check the arguments, then run the compiled kernel.

Called by `model_executor/layers/activation.py`. Naive twins: `_custom_ops/naive/activation.py`.
Nothing here computes. The `*_and_mul` ops take gate and up side by side in one row.
"""

from __future__ import annotations

from torch import Tensor

from vllm._custom_ops.checks import FLOATS, check_like, check_rank, check_rows, check_tensor
from vllm._custom_ops.library import ops
from vllm.errors import ShapeError


def _check_gated(op: str, out: Tensor, input: Tensor) -> None:
    check_rank(op, "input", input, 1, 3)
    check_tensor(op, "input", input, FLOATS, (None,) * input.dim())
    if input.shape[-1] % 2:
        raise ShapeError(f"{op}: the last size of input must be even, got {tuple(input.shape)}")
    check_tensor(op, "out", out, (input.dtype,), (*input.shape[:-1], input.shape[-1] // 2))
    check_rows(op, "input", input)
    check_rows(op, "out", out)


def _check_elementwise(op: str, out: Tensor, input: Tensor) -> None:
    check_rank(op, "input", input, 1, 3)
    check_tensor(op, "input", input, FLOATS, (None,) * input.dim())
    check_like(op, "out", out, "input", input)
    check_rows(op, "input", input)
    check_rows(op, "out", out)


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    """Write silu(gate) * up.

    Args:
        out: [..., d], dtype of `input`.
        input: float32 or bfloat16 [..., 2d] of 1 to 3 dimensions, gate then up.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    _check_gated("silu_and_mul", out, input)
    ops().silu_and_mul(out, input)


def gelu_and_mul(out: Tensor, input: Tensor) -> None:
    """Write gelu(gate) * up with the exact (erf) gelu; arguments as in `silu_and_mul`."""
    _check_gated("gelu_and_mul", out, input)
    ops().gelu_and_mul(out, input)


def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    """Write gelu(gate) * up with the tanh gelu; arguments as in `silu_and_mul`."""
    _check_gated("gelu_tanh_and_mul", out, input)
    ops().gelu_tanh_and_mul(out, input)


def gelu_new(out: Tensor, input: Tensor) -> None:
    """Write the tanh gelu of GPT-2.

    Args:
        out: like `input`; may be `input` itself.
        input: float32 or bfloat16 of 1 to 3 dimensions.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    _check_elementwise("gelu_new", out, input)
    ops().gelu_new(out, input)


def gelu_fast(out: Tensor, input: Tensor) -> None:
    """Write the tanh gelu with FastGELU's constant; arguments as in `gelu_new`."""
    _check_elementwise("gelu_fast", out, input)
    ops().gelu_fast(out, input)


def gelu_quick(out: Tensor, input: Tensor) -> None:
    """Write x * sigmoid(1.702 x); arguments as in `gelu_new`."""
    _check_elementwise("gelu_quick", out, input)
    ops().gelu_quick(out, input)
