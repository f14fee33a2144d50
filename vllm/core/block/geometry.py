"""Superblock geometry: how an arena is cut so that every group's blocks fit with little waste.

Called by `core/capacity.py` at start-up, once for each rank. Pure arithmetic over sizes in bytes;
it allocates nothing and knows no layer. All limits are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.cache_spec import BLOCK_ALIGNMENT_BYTES
from vllm.errors import ConfigError

MAX_SUPERBLOCK_BYTES = 64 << 20
MIN_SUPERBLOCKS = 64
MAX_WASTE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperblockGeometry:
    """Size of a superblock and what each group makes of it.

    Attributes:
        superblock_bytes: S.
        blocks_per_superblock: K_g for each group, S // u_g.
        waste: for each group, the share of a superblock behind its last block.
        within_limits: whether size, number and waste keep the limits; False in small arenas, where
            the least expected loss was taken.
    """

    superblock_bytes: int
    blocks_per_superblock: tuple[int, ...]
    waste: tuple[float, ...]
    within_limits: bool


def tail_waste(superblock_bytes: int, block_bytes: int) -> float:
    """Return the share of a superblock that whole blocks of `block_bytes` leave unused."""
    return superblock_bytes % block_bytes / superblock_bytes


def plan_superblocks(
    block_bytes: Sequence[int],
    arena_bytes: int,
    *,
    max_superblock_bytes: int = MAX_SUPERBLOCK_BYTES,
    min_superblocks: int = MIN_SUPERBLOCKS,
    max_waste: float = MAX_WASTE,
) -> SuperblockGeometry:
    """Choose the smallest superblock that wastes at most `max_waste` for every group.

    S is a multiple of the largest block, at most `max_superblock_bytes`, with at least
    `min_superblocks` of them in the arena. Where no such S exists, the S with the least expected
    loss is taken: its worst tail waste plus half a superblock for each group.

    Args:
        block_bytes: u_g of each group, multiples of 256.
        arena_bytes: bytes to be cut, at least one of the largest blocks.
        max_superblock_bytes: upper limit of S.
        min_superblocks: lower limit of their number.
        max_waste: upper limit of the share of a superblock that any group leaves unused.

    Raises:
        ConfigError: a block does not fit into the arena, or is not aligned.
    """
    largest = max(block_bytes)
    if any(size <= 0 or size % BLOCK_ALIGNMENT_BYTES for size in block_bytes):
        raise ConfigError(
            f"block sizes {list(block_bytes)} must be positive multiples of "
            f"{BLOCK_ALIGNMENT_BYTES} bytes"
        )
    if largest > arena_bytes:
        raise ConfigError(
            f"a cache block has {largest} bytes but the cache has only {arena_bytes}; give the "
            "cache more memory or use a smaller block size"
        )
    best = largest
    best_loss = float("inf")
    limit = max(largest, min(max_superblock_bytes, arena_bytes // 2))
    for size in range(largest, limit + 1, largest):
        waste = max(tail_waste(size, small) for small in block_bytes)
        in_number = size * min_superblocks <= arena_bytes
        if waste <= max_waste and in_number and size <= max_superblock_bytes:
            return _geometry(size, block_bytes, within_limits=True)
        loss = waste + len(block_bytes) * size / (2 * arena_bytes)
        if loss < best_loss:
            best, best_loss = size, loss
    return _geometry(best, block_bytes, within_limits=False)


def _geometry(size: int, block_bytes: Sequence[int], *, within_limits: bool) -> SuperblockGeometry:
    return SuperblockGeometry(
        superblock_bytes=size,
        blocks_per_superblock=tuple(size // small for small in block_bytes),
        waste=tuple(tail_waste(size, small) for small in block_bytes),
        within_limits=within_limits,
    )
