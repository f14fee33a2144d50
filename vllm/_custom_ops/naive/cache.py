"""Cache ops in plain PyTorch: the twins of `_custom_ops/cache.py`.

Read by tests and by anyone who wants to know what the ops mean. Never called by the engine.
"""

from __future__ import annotations

from torch import Tensor

UNIT_BYTES = 256


def reshape_and_cache(
    key_THD: Tensor, value_THD: Tensor, key_cache: Tensor, value_cache: Tensor, slots_T2: Tensor
) -> None:
    """Write each token's rows where its slot says."""
    for token, (offset, row) in enumerate(slots_T2.tolist()):
        if offset >= 0:
            key_cache[offset, row] = key_THD[token]
            value_cache[offset, row] = value_THD[token]


def copy_blocks(arena: Tensor, copies_N2: Tensor, block_bytes: int) -> None:
    """Copy blocks inside the arena, one after the other."""
    for source, target in (copies_N2 * UNIT_BYTES).tolist():
        arena[target : target + block_bytes] = arena[source : source + block_bytes].clone()
