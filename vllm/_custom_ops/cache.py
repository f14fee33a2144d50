"""Doors of the cache ops: write new rows, copy blocks.

Called by `attention/backends/*` and `worker/cache_engine.py`. Naive twins:
`_custom_ops/naive/cache.py`. The compiled ops check their arguments; nothing here computes.
"""

from __future__ import annotations

from torch import Tensor

from vllm._custom_ops.library import CACHE_OPS


def reshape_and_cache(
    key_THD: Tensor, value_THD: Tensor, key_cache: Tensor, value_cache: Tensor, slots_T2: Tensor
) -> None:
    """Write new K and V rows into their cache slots.

    Args:
        key_THD: float32, bfloat16 or, on CUDA, float16 [T, Hkv, D], contiguous in D.
        value_THD: same.
        key_cache: [num_units, block_tokens, Hkv, D] view, stride(0) = 256 bytes.
        value_cache: same.
        slots_T2: int32; (offset of the block in 256-byte units, row inside it); offset -1 skips the
            token.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype, or a slot lies outside. CUDA
            checks slots on the device: one that lies outside ends its work with an assertion.
    """
    CACHE_OPS.reshape_and_cache(key_THD, value_THD, key_cache, value_cache, slots_T2)


def copy_blocks(arena: Tensor, copies_N2: Tensor, block_bytes: int) -> None:
    """Copy blocks inside the arena, one after the other.

    Args:
        arena: uint8 [bytes].
        copies_N2: int64 on the CPU, wherever the arena is; (source, target) offsets in 256-byte
            units. On CUDA two blocks are equal or disjoint.
        block_bytes: bytes of one block.

    Raises:
        ShapeError: an argument has the wrong shape or dtype, or a block lies outside the arena.
    """
    CACHE_OPS.copy_blocks(arena, copies_N2, block_bytes)
