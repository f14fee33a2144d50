"""Door of the rotary embedding: check the arguments, then run the compiled kernel.

Called by `model_executor/layers/rotary_embedding.py`, which builds the table of angles. Naive twin:
`_custom_ops/naive/rope.py`. Nothing here computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm._custom_ops.checks import (
    FLOATS,
    check_contiguous,
    check_rank,
    check_rows,
    check_tensor,
    describe,
)
from vllm._custom_ops.library import ops
from vllm.errors import ShapeError


def _check_heads(name: str, tensor: Tensor, num_tokens: int, head_size: int) -> None:
    check_rank("rotary_embedding", name, tensor, 2, 3)
    check_tensor(
        "rotary_embedding", name, tensor, FLOATS, (num_tokens, *[None] * (tensor.dim() - 1))
    )
    check_rows("rotary_embedding", name, tensor)
    width = tensor.shape[-1]
    if width != head_size and (tensor.dim() == 3 or width % head_size):
        raise ShapeError(
            f"rotary_embedding: {name} must be [T, heads * {head_size}] or [T, heads, {head_size}], "
            f"got {describe(tensor)}"
        )


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> None:
    """Turn the first rot_dim elements of every query and key head, in place.

    Args:
        positions: int64 [T], rows of the table; each must lie inside it.
        query: float32 or bfloat16 [T, heads * head_size] or [T, heads, head_size]; tokens and heads
            may lie at any stride.
        key: same form and dtype as `query`, its own number of heads.
        head_size: elements of one head.
        cos_sin_cache: float32 [max_pos, rot_dim], a row is rot_dim/2 cosines then as many sines;
            rot_dim is even and at most head_size.
        is_neox: pairs are (i, i + rot_dim/2), else (2i, 2i + 1).

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
        RuntimeError: a position lies outside the table (found by the kernel before it writes).
    """
    op = "rotary_embedding"
    check_tensor(op, "positions", positions, (torch.int64,), (None,))
    check_contiguous(op, "positions", positions)
    _check_heads("query", query, positions.shape[0], head_size)
    _check_heads("key", key, positions.shape[0], head_size)
    if key.dtype != query.dtype:
        raise ShapeError(f"{op}: key is {key.dtype} but query is {query.dtype}")
    check_tensor(op, "cos_sin_cache", cos_sin_cache, (torch.float32,), (None, None))
    check_contiguous(op, "cos_sin_cache", cos_sin_cache)
    rot_dim = cos_sin_cache.shape[-1]
    if rot_dim % 2 or not 0 < rot_dim <= head_size:
        raise ShapeError(f"{op}: rot_dim must be even and 2 to {head_size}, got {rot_dim}")
    ops().rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)
