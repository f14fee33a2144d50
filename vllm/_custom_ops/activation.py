"""Doors of the activation ops.

Called by `model_executor/layers/activation.py`. Naive twins: `_custom_ops/naive/activation.py`.
The compiled op checks its arguments; nothing here computes. The `*_and_mul` ops take gate and up
side by side in one row.
"""

from __future__ import annotations

from torch import Tensor

from vllm._custom_ops.library import C


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    """Write silu(gate) * up.

    Args:
        out: [..., d], dtype of `input`.
        input: float32, bfloat16 or, on CUDA, float16; [..., 2d] of 1 to 3 dimensions, gate then up.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.silu_and_mul(out, input)


def gelu_and_mul(out: Tensor, input: Tensor) -> None:
    """Write gelu(gate) * up with the exact (erf) gelu; arguments as in `silu_and_mul`."""
    C.gelu_and_mul(out, input)


def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    """Write gelu(gate) * up with the tanh gelu; arguments as in `silu_and_mul`."""
    C.gelu_tanh_and_mul(out, input)


def gelu_new(out: Tensor, input: Tensor) -> None:
    """Write the tanh gelu of GPT-2.

    Args:
        out: like `input`; may be `input` itself.
        input: float32, bfloat16 or, on CUDA, float16; of 1 to 3 dimensions.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.gelu_new(out, input)


def gelu_fast(out: Tensor, input: Tensor) -> None:
    """Write the tanh gelu with FastGELU's constant; arguments as in `gelu_new`."""
    C.gelu_fast(out, input)


def gelu_quick(out: Tensor, input: Tensor) -> None:
    """Write x * sigmoid(1.702 x); arguments as in `gelu_new`."""
    C.gelu_quick(out, input)


def relu2(out: Tensor, input: Tensor) -> None:
    """Write relu(x) ** 2, rounded once; arguments as in `gelu_new`; CUDA tensors only."""
    C.relu2(out, input)


def mul_sigmoid(x: Tensor, gate: Tensor) -> None:
    """Multiply x by sigmoid(gate), rounded to the dtype before the product; CUDA tensors only.

    Args:
        x: float32, bfloat16 or float16 of 1 to 3 dimensions; overwritten.
        gate: like `x`; its rows may lie at another stride.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.mul_sigmoid(x, gate)


def add_gated(out_TE: Tensor, x_TE: Tensor, gate_T1: Tensor) -> None:
    """Add sigmoid(gate) * x to out; sigmoid, product and sum are each rounded; CUDA tensors only.

    Args:
        out_TE: float32, bfloat16 or float16 [T, E]; changed in place.
        x_TE: like `out_TE`.
        gate_T1: [T, 1], dtype of `out_TE`.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.add_gated(out_TE, x_TE, gate_T1)


def soft_cap(x: Tensor, scale: float, cap: float) -> None:
    """Overwrite x with cap * tanh(x * scale / cap), rounded once.

    torch.tanh may round an element by its place in memory; this does not.

    Args:
        x: float32, bfloat16 or, on CUDA, float16 [T, N], contiguous in N.
        scale: factor that comes before the cap.
        cap: bound of the results, positive.

    Raises:
        ShapeError: an argument has the wrong shape, stride, dtype or value.
    """
    C.soft_cap(x, scale, cap)
