"""What tests of CUDA ops share: inputs and poisoned outputs on the device, tolerances, caches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.utils.ops import random_rows

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (8e-3, 1e-3),
    torch.float16: (2e-3, 2e-4),
}
"""rtol and atol against a twin that rounds in the same places."""


def draw(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Return normal numbers on the device."""
    return random_rows(*shape, dtype=dtype, seed=seed, scale=scale).cuda()


def poisoned_like(x: Tensor) -> Tensor:
    """Return a tensor that an op must overwrite in every element."""
    return torch.full_like(x, float("nan"))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Compare within the tolerance of the dtype."""
    rtol, atol = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def make_table(max_pos: int, rot_dim: int) -> Tensor:
    """Return the usual table of angles with base 10000."""
    inverse = 10000.0 ** (-torch.arange(0, rot_dim, 2) / rot_dim)
    angles = torch.arange(max_pos)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), -1).cuda()


def make_caches(
    block_tokens: int, kv_heads: int, head_size: int, dtype: torch.dtype, num_units: int = 1000
) -> tuple[Tensor, Tensor, Tensor]:
    """Return an arena full of NaN and the key and value caches of a layer inside it."""
    row_bytes = kv_heads * head_size * dtype.itemsize
    field_bytes = -(-block_tokens * row_bytes // 256) * 256
    arena = torch.full((num_units * 256 + 2 * field_bytes,), 255, dtype=torch.uint8, device="cuda")
    shape = (num_units, block_tokens, kv_heads, head_size)
    strides = (256 // dtype.itemsize, kv_heads * head_size, head_size, 1)
    typed = arena.view(dtype)
    key = typed.as_strided(shape, strides)
    return arena, key, typed.as_strided(shape, strides, field_bytes // dtype.itemsize)


def make_slots(num_tokens: int, block_tokens: int, block_units: int, skipped: int = 1) -> Tensor:
    """Return int32 slots of consecutive tokens in blocks that lie backwards; one is skipped."""
    tokens = torch.arange(num_tokens)
    blocks = tokens // block_tokens
    slots = torch.stack(((blocks.max() - blocks) * block_units, tokens % block_tokens), -1)
    slots[skipped, 0] = -1
    return slots.int().cuda()
