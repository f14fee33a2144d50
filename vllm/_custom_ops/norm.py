"""Doors of the norm ops: check the arguments, then run the compiled kernel.

Called by `model_executor/layers/layernorm.py`. Naive twins: `_custom_ops/naive/norm.py`. Nothing here
computes; the result of a row depends on that row alone, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm._custom_ops.checks import FLOATS, check_like, check_rank, check_rows, check_tensor
from vllm._custom_ops.library import ops


def _check_weight(op: str, weight: Tensor, input: Tensor) -> None:
    check_tensor(op, "weight", weight, (torch.float32, input.dtype), (input.shape[-1],))
    check_rows(op, "weight", weight)


def rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    """Normalise each row by its root mean square, then scale it.

    Args:
        out: like `input`; may be `input` itself.
        input: float32 or bfloat16, [..., hidden] of 1 to 3 dimensions; the last is contiguous.
        weight: [hidden], of the input's dtype (multiplied after rounding) or float32 (multiplied
            before the only rounding, for families whose scale is 1 + w).
        epsilon: added to the mean square.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    check_rank("rms_norm", "input", input, 1, 3)
    check_tensor("rms_norm", "input", input, FLOATS, (None,) * input.dim())
    check_rows("rms_norm", "input", input)
    check_like("rms_norm", "out", out, "input", input)
    check_rows("rms_norm", "out", out)
    _check_weight("rms_norm", weight, input)
    ops().rms_norm(out, input, weight, epsilon)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    """Add, then normalise: residual := input + residual; input := rms_norm(residual).

    Args:
        input: float32 or bfloat16, [..., hidden] of 1 to 3 dimensions; overwritten with the normed rows.
        residual: like `input`; overwritten with the sum, rounded to its dtype.
        weight: as in `rms_norm`.
        epsilon: added to the mean square.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    check_rank("fused_add_rms_norm", "input", input, 1, 3)
    check_tensor("fused_add_rms_norm", "input", input, FLOATS, (None,) * input.dim())
    check_rows("fused_add_rms_norm", "input", input)
    check_like("fused_add_rms_norm", "residual", residual, "input", input)
    check_rows("fused_add_rms_norm", "residual", residual)
    _check_weight("fused_add_rms_norm", weight, input)
    ops().fused_add_rms_norm(input, residual, weight, epsilon)
