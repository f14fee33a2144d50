"""Rotary embedding in plain PyTorch: the twin of `_custom_ops/rope.py`.

Read by tests and by anyone who wants to know what the op means. Never called by the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _rotate(x_THD: Tensor, cos: Tensor, sin: Tensor, rot_dim: int, is_neox: bool) -> None:
    part = x_THD[..., :rot_dim].float()
    if is_neox:
        first, second = part.chunk(2, dim=-1)
    else:
        first, second = part[..., 0::2], part[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    whole = torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(-2)
    x_THD[..., :rot_dim] = whole.to(x_THD.dtype)


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> None:
    """Turn the first rot_dim elements of every head by its token's angles; float32 inside."""
    rot_dim = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    for x in (query, key):
        heads = x if x.dim() == 3 else x.unflatten(-1, (-1, head_size))
        _rotate(heads, cos, sin, rot_dim, is_neox)
