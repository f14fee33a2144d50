"""Doors of the norm ops.

Called by `model_executor/layers/layernorm.py`. Naive twins: `_custom_ops/naive/norm.py`. The
compiled op checks its arguments; nothing here computes. The result of a row depends on that row
alone, bit for bit.
"""

from __future__ import annotations

from torch import Tensor

from vllm._custom_ops.library import C


def rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    """Normalise each row by its root mean square, then scale it.

    Args:
        out: like `input`; may be `input` itself.
        input: float32, bfloat16 or, on CUDA, float16; [..., hidden] of 1 to 3 dimensions; the
            last is contiguous.
        weight: [hidden], of the input's dtype (multiplied after rounding) or float32 (multiplied
            before the only rounding, for families whose scale is 1 + w).
        epsilon: added to the mean square.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.rms_norm(out, input, weight, epsilon)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    """Add, then normalise: residual := input + residual; input := rms_norm(residual).

    Args:
        input: as in `rms_norm`; overwritten with the result.
        residual: like `input`; overwritten with the sum, rounded to its dtype.
        weight: as in `rms_norm`.
        epsilon: added to the mean square.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.fused_add_rms_norm(input, residual, weight, epsilon)


def norm_add_rms_norm(
    input: Tensor, residual: Tensor, input_weight: Tensor, weight: Tensor, epsilon: float
) -> None:
    """Norm, add, norm: input := rms_norm(input), then `fused_add_rms_norm`; CUDA tensors only.

    Args:
        input: as in `rms_norm`; overwritten with the result.
        residual: like `input`; overwritten with the sum, rounded to its dtype.
        input_weight: weight of the first norm, as in `rms_norm`.
        weight: weight of the norm of the sum, of the same dtype.
        epsilon: of both norms.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.norm_add_rms_norm(input, residual, input_weight, weight, epsilon)


def add_parts_rms_norm(
    out: Tensor, parts_PTN: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> None:
    """Add up a product's parts, add the sum, normalise; CUDA tensors only.

    residual := residual + sum of parts; out := rms_norm(residual). The sum is rounded to the dtype
    of `residual` before it is added: the results are those of `fused_add_rms_norm` bit for bit.

    Args:
        out: like `residual`.
        parts_PTN: float32 [P, T, N], contiguous, as `linear.skinny_linear_parts` leaves them; added
            up in their order. One pass over memory where P <= 9 and N is a multiple of 256 from
            1,280 to 4,096, of 16-bit numbers.
        residual: [T, N], contiguous in N; overwritten with the sum, rounded to its dtype.
        weight: [N], as in `rms_norm`.
        epsilon: added to the mean square.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.add_parts_rms_norm(out, parts_PTN, residual, weight, epsilon)
