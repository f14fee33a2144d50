"""Door of the rotary embedding.

Called by `model_executor/layers/rotary_embedding.py`, which builds the table of angles. Naive twin:
`_custom_ops/naive/rope.py`. The compiled op checks its arguments; nothing here computes.
"""

from __future__ import annotations

from torch import Tensor

from vllm._custom_ops.library import C


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
        query: float32, bfloat16 or, on CUDA, float16; [T, heads * head_size] or
            [T, heads, head_size]; tokens and heads may lie at any stride.
        key: same form and dtype as `query`, its own number of heads.
        head_size: elements of one head.
        cos_sin_cache: float32 [max_pos, rot_dim], a row is rot_dim/2 cosines then as many sines;
            rot_dim is even and at most head_size.
        is_neox: pairs are (i, i + rot_dim/2), else (2i, 2i + 1).

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype, or a position lies outside.
            CUDA checks positions on the device: one that lies outside ends its work with an
            assertion.
    """
    C.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)
