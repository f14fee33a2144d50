"""Argument checks shared by the typed doors of the compiled ops.

Called by every door before it reaches `torch.ops`; each check raises ShapeError that says what was
given and what is allowed. Nothing here computes, copies or converts a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm.errors import ShapeError

FLOATS = (torch.float32, torch.bfloat16)


def describe(tensor: Tensor) -> str:
    """Return dtype, shape, strides and device of a tensor, for messages."""
    return (
        f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()} "
        f"on {tensor.device}"
    )


def check_tensor(
    op: str,
    name: str,
    tensor: Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
) -> None:
    """Check dtype and shape of one argument.

    Args:
        shape: the sizes allowed, None where any size is.

    Raises:
        ShapeError: naming the op, the argument, what it was given and what it takes.
    """
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(d) for d in dtypes)
        raise ShapeError(f"{op}: {name} must be {allowed}, got {describe(tensor)}")
    given = tensor.shape
    if len(given) != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, given, strict=True)
    ):
        wanted = "[" + ", ".join("any" if s is None else str(s) for s in shape) + "]"
        raise ShapeError(f"{op}: {name} must have shape {wanted}, got {describe(tensor)}")


def check_rows(op: str, name: str, tensor: Tensor) -> None:
    """Check that the last dimension of a tensor is contiguous; rows may lie at any stride."""
    if tensor.dim() > 0 and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ShapeError(
            f"{op}: the last dimension of {name} must be contiguous, got {describe(tensor)}; "
            "call .contiguous() on it first"
        )


def check_contiguous(op: str, name: str, tensor: Tensor) -> None:
    """Check that a tensor is contiguous as a whole."""
    if not tensor.is_contiguous():
        raise ShapeError(f"{op}: {name} must be contiguous, got {describe(tensor)}")


def check_like(op: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Check that two arguments agree in shape and dtype."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        raise ShapeError(
            f"{op}: {name} must have the shape and dtype of {other_name} ({describe(other)}), "
            f"got {describe(tensor)}"
        )


def check_rank(op: str, name: str, tensor: Tensor, least: int, most: int) -> None:
    """Check that the number of dimensions lies in least..most."""
    if not least <= tensor.dim() <= most:
        allowed = str(least) if least == most else f"{least} to {most}"
        raise ShapeError(f"{op}: {name} must have {allowed} dimensions, got {describe(tensor)}")
