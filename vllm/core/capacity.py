"""What the cache holds: the layout that all ranks agree on, and its capacity in honest numbers.

Called by the engine at start-up, with what every rank reported. Pure arithmetic; it allocates
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.cache_spec import (
    CacheLayout,
    Full,
    GroupLayout,
    KVCacheGroup,
    LayerCacheSpec,
    make_group,
)
from vllm.core.block.geometry import SuperblockGeometry, plan_superblocks
from vllm.core.block.table import make_block_managers
from vllm.core.need import count_superblocks, peak_blocks
from vllm.errors import ConfigError

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCapacity:
    """One group's part of the cache.

    Attributes:
        block_bytes: bytes of a block on the first rank.
        blocks_per_sequence: most blocks held by a sequence of max_model_len tokens.
        waste: share of a superblock behind the group's last block, the worst of all ranks.
    """

    name: str
    layers: tuple[int, ...]
    block_tokens: int
    block_bytes: int
    blocks_per_superblock: int
    blocks_per_sequence: int
    waste: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityReport:
    """What a layout means for the user.

    Attributes:
        arena_bytes: bytes of the arena on the first rank.
        superblock_bytes: S on the first rank.
        bytes_per_sequence: bytes that one sequence of max_model_len tokens holds on the first rank.
        max_concurrency: sequences of max_model_len tokens that fit at once.
        tokens_at_max_len: tokens that fit when every sequence has max_model_len of them.
        within_limits: whether superblocks keep the limits on size, number and waste.
    """

    arena_bytes: int
    superblock_bytes: int
    num_superblocks: int
    max_model_len: int
    bytes_per_sequence: int
    max_concurrency: float
    tokens_at_max_len: int
    within_limits: bool
    groups: tuple[GroupCapacity, ...]


def make_uniform_groups(
    specs: Sequence[LayerCacheSpec], block_tokens: int
) -> tuple[KVCacheGroup, ...]:
    """Put all layers that own a cache into one Full group, as uniform models want it.

    Raises:
        ConfigError: no layer has a cache, or one has a lifetime other than Full.
    """
    owners = [spec for spec in specs if spec.fields and spec.reads_from is None]
    others = {
        s.layer: type(s.lifetime).__name__ for s in owners if not isinstance(s.lifetime, Full)
    }
    if others:
        raise ConfigError(
            f"layers {others} do not keep every token; this build serves uniform models only, "
            "whose layers all have lifetime Full"
        )
    if not owners:
        raise ConfigError("no layer of the model has a KV cache; there is nothing to schedule by")
    return (make_group("full", owners, block_tokens),)


def make_layout(
    groups: Sequence[Sequence[KVCacheGroup]],
    cache_bytes: Sequence[int],
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    num_blocks: int | None = None,
    check_max_model_len: bool = True,
) -> tuple[CacheLayout, CapacityReport]:
    """Agree on the shape of the cache over all ranks, and prove that it serves max_model_len.

    Args:
        groups: for each rank, its groups (same layers, own sizes).
        cache_bytes: for each rank, bytes that the cache may take.
        max_model_len: most tokens of a sequence.
        max_num_batched_tokens: most tokens of a step.
        num_blocks: instead of `cache_bytes`, room for this many blocks of every group.
        check_max_model_len: False waives the proof, for a report of what fits; sequences then end
            where the cache does.

    Raises:
        ConfigError: ranks disagree about groups, nothing fits, or one request of max_model_len
            tokens does not fit into the empty cache.
    """
    _check_same_groups(groups)
    if num_blocks is not None:
        if num_blocks < 1:
            raise ConfigError(f"num_gpu_blocks_override is {num_blocks}; it must be at least 1")
        cache_bytes = [sum(g.block_bytes for g in own) * num_blocks for own in groups]
    geometries = [
        plan_superblocks([g.block_bytes for g in own], size)
        for own, size in zip(groups, cache_bytes, strict=True)
    ]
    per_superblock = _agree_on_slots(groups, cache_bytes, geometries)
    sizes = [_superblock_bytes(own, per_superblock) for own in groups]
    # One more superblock holds the pad blocks of padded rows; an override counts usable blocks
    # only.
    spare = 0 if num_blocks is not None else 1
    num_superblocks = min(
        total // size - spare for total, size in zip(cache_bytes, sizes, strict=True)
    )
    layout = CacheLayout(
        groups=tuple(
            GroupLayout(
                name=group.name,
                layers=group.layers,
                block_tokens=group.block_tokens,
                blocks_per_superblock=per,
            )
            for group, per in zip(groups[0], per_superblock, strict=True)
        ),
        num_superblocks=num_superblocks,
    )
    report = _report(
        groups, layout, sizes, max_model_len, max_num_batched_tokens,
        within_limits=all(geometry.within_limits for geometry in geometries),
    )  # fmt: skip
    if check_max_model_len:
        _prove_max_model_len(groups[0], layout, report, max_num_batched_tokens)
    return layout, report


def _check_same_groups(groups: Sequence[Sequence[KVCacheGroup]]) -> None:
    """All ranks must mean the same by a block id."""
    names = [group.name for group in groups[0]]
    for rank, own in enumerate(groups):
        found = [group.name for group in own]
        if found != names:
            raise ConfigError(
                f"rank {rank} reports cache groups {found}, rank 0 reports {names}; all ranks must "
                "have the same groups in the same order"
            )
        for group, first in zip(own, groups[0], strict=True):
            mine = (group.lifetime, group.layers, group.block_tokens)
            if mine != (first.lifetime, first.layers, first.block_tokens):
                raise ConfigError(
                    f"cache group '{group.name}' differs between ranks: rank {rank} has {mine}, "
                    f"rank 0 has {(first.lifetime, first.layers, first.block_tokens)}"
                )


def _superblock_bytes(groups: Sequence[KVCacheGroup], per_superblock: Sequence[int]) -> int:
    """Return a rank's S for agreed K_g."""
    return max(per * group.block_bytes for per, group in zip(per_superblock, groups, strict=True))


def _agree_on_slots(
    groups: Sequence[Sequence[KVCacheGroup]],
    cache_bytes: Sequence[int],
    geometries: Sequence[SuperblockGeometry],
) -> tuple[int, ...]:
    """Return the K_g, among those the ranks would choose, that serve the poorest rank best.

    Value: how many blocks of the scarcest group, by share of what its rank's bytes could hold.
    """

    def value(slots: tuple[int, ...]) -> float:
        counts = [
            total // _superblock_bytes(own, slots)
            for own, total in zip(groups, cache_bytes, strict=True)
        ]
        return min(
            min(counts) * per * group.block_bytes / total
            for own, total in zip(groups, cache_bytes, strict=True)
            for per, group in zip(slots, own, strict=True)
        )

    return max(dict.fromkeys(geometry.blocks_per_superblock for geometry in geometries), key=value)


def _report(
    groups: Sequence[Sequence[KVCacheGroup]],
    layout: CacheLayout,
    sizes: Sequence[int],
    max_model_len: int,
    max_chunk: int,
    *,
    within_limits: bool,
) -> CapacityReport:
    first = groups[0]
    # A sequence's cache rows: all tokens but the last, which is never an input.
    managers = make_block_managers(first)
    peaks = peak_blocks(managers, max_model_len, max_chunk)
    steady = [manager.need(max_model_len - 1, 1) for manager in managers]
    share = sum(
        need / group.blocks_per_superblock
        for need, group in zip(steady, layout.groups, strict=True)
    )
    concurrency = layout.num_superblocks / share if share else math.inf
    capacities = []
    for position, (group, agreed) in enumerate(zip(first, layout.groups, strict=True)):
        per = agreed.blocks_per_superblock
        waste = max(
            1 - per * own[position].block_bytes / size
            for own, size in zip(groups, sizes, strict=True)
        )
        capacities.append(
            GroupCapacity(
                name=group.name,
                layers=group.layers,
                block_tokens=group.block_tokens,
                block_bytes=group.block_bytes,
                blocks_per_superblock=per,
                blocks_per_sequence=peaks[position],
                waste=waste,
            )
        )
    return CapacityReport(
        arena_bytes=layout.num_superblocks * sizes[0],
        superblock_bytes=sizes[0],
        num_superblocks=layout.num_superblocks,
        max_model_len=max_model_len,
        bytes_per_sequence=sum(
            need * group.block_bytes for need, group in zip(steady, first, strict=True)
        ),
        max_concurrency=concurrency,
        tokens_at_max_len=int(concurrency * max_model_len) if share else 0,
        within_limits=within_limits,
        groups=tuple(capacities),
    )


def _prove_max_model_len(
    groups: Sequence[KVCacheGroup], layout: CacheLayout, report: CapacityReport, max_chunk: int
) -> None:
    """Refuse a cache in which one request of max_model_len could not end."""
    managers = make_block_managers(groups)
    slots = [group.blocks_per_superblock for group in layout.groups]

    def fits(num_tokens: int) -> bool:
        needed = count_superblocks(peak_blocks(managers, num_tokens, max_chunk), slots)
        return needed <= layout.num_superblocks

    if fits(report.max_model_len):
        return
    low, high = 0, report.max_model_len
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    needed = count_superblocks(peak_blocks(managers, report.max_model_len, max_chunk), slots)
    raise ConfigError(
        f"the KV cache holds {layout.num_superblocks} superblocks "
        f"({max(0, report.arena_bytes) / _MIB:.1f} MiB), but one request of max_model_len = "
        f"{report.max_model_len} tokens needs {needed} "
        f"({needed * report.superblock_bytes / _MIB:.1f} MiB); lower max_model_len to {low} or "
        "give the cache more memory (VLLM_CPU_KVCACHE_SPACE, gpu_memory_utilization, "
        "num_gpu_blocks_override)"
    )
