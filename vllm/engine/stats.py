"""Numbers of an engine: one snapshot of now, and what happened since the last look.

`EngineStats` feeds /stats, `vllm stats` and the gauges; `IterationStats` feeds counters,
histograms and the log. Made by the caller's side from what the engine side reports each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm.engine.messages import CacheGroup, CoreStats, EngineReady
from vllm.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """One snapshot of a running engine.

    Attributes:
        scheduler_running: whether the engine side is alive and takes steps.
        num_total_gpu_blocks, num_free_gpu_blocks: over all groups; blocks kept only for prefix
            reuse are free. Superblocks that no group owns count as what they give when sequences of
            max_model_len share them.
        gpu_cache_usage: share of the cache's bytes held by requests, 0 to 1.
        fragmentation: share of the bytes of superblocks in use that lie in no block in use.
        gpu_prefix_cache_hit_rate: found prompt tokens over looked-up ones, -1 when caching is off.
        avg_queue_time_ms: mean waiting time of the requests admitted so far.
        blocks_by_group: name -> total, used, cached and free blocks, as if the group alone could
            take the superblocks that no group owns.
        cache_groups: name -> layers, sizes in bytes and tokens, blocks of a full sequence, waste.
        kernels: layer -> the kernel that serves it, and why not another.
        startup: facts of the start: sizes, capacity, seconds.
        hybrid: mode, and for each layer type what its layers keep, and whether that is less than
            they were trained with.
    """

    num_running_requests: int = 0
    num_waiting_requests: int = 0
    scheduler_running: bool = True
    num_total_gpu_blocks: int = 0
    num_free_gpu_blocks: int = 0
    gpu_cache_usage: float = 0.0
    fragmentation: float = 0.0
    gpu_prefix_cache_hit_rate: float = -1.0
    num_preemptions: int = 0
    num_steps: int = 0
    avg_queue_time_ms: float = 0.0
    last_step_ms: float = 0.0
    blocks_by_group: dict[str, dict[str, int]] = field(default_factory=dict)
    cache_groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    kernels: dict[int, dict[str, str]] = field(default_factory=dict)
    startup: dict[str, Any] = field(default_factory=dict)
    hybrid: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """What a request was, once it has ended."""

    reason: FinishReason
    num_prompt_tokens: int
    num_generation_tokens: int
    n: int
    latency_s: float


@dataclass(slots=True, kw_only=True)
class IterationStats:
    """What happened in one step, or several added up.

    Attributes:
        times_in_queue_s: of the requests that entered their first step.
        times_to_first_token_s, times_per_output_token_s: one entry for each request that got one.
    """

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    times_in_queue_s: list[float] = field(default_factory=list)
    times_to_first_token_s: list[float] = field(default_factory=list)
    times_per_output_token_s: list[float] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)


def make_engine_stats(
    stats: CoreStats,
    ready: EngineReady,
    *,
    is_alive: bool,
    has_prefix_caching: bool,
    avg_queue_time_ms: float,
) -> EngineStats:
    """Return the snapshot that the engine side's latest report describes."""
    groups = {
        g.name: {
            "total": g.num_total_blocks,
            "used": g.num_used_blocks,
            "cached": g.num_cached_blocks,
            "free": g.num_total_blocks - g.num_used_blocks,
        }
        for g in stats.groups
    }
    total = _count_blocks(stats, ready)
    used = sum(g["used"] for g in groups.values())
    return EngineStats(
        num_running_requests=stats.num_running if is_alive else 0,
        num_waiting_requests=stats.num_waiting if is_alive else 0,
        scheduler_running=is_alive,
        num_total_gpu_blocks=total,
        num_free_gpu_blocks=total - used,
        gpu_cache_usage=stats.cache_usage,
        fragmentation=_find_fragmentation(stats, ready),
        gpu_prefix_cache_hit_rate=_hit_rate(stats) if has_prefix_caching else -1.0,
        num_preemptions=stats.num_preemptions,
        num_steps=stats.num_steps,
        avg_queue_time_ms=avg_queue_time_ms,
        last_step_ms=stats.last_step_ms,
        blocks_by_group=groups,
        cache_groups={g.name: describe_group(g) for g in ready.cache_groups},
        kernels={k.layer: {"kernel": k.kernel, "note": k.note} for k in ready.kernels},
        startup={
            "num_cache_tokens": ready.num_cache_tokens,
            "cache_bytes": ready.cache_bytes,
            "weight_bytes": ready.weight_bytes,
            "load_seconds": ready.load_seconds,
            **ready.startup,
        },
    )


def describe_group(group: CacheGroup) -> dict[str, Any]:
    """Return what a cache group is, for JSON; its name is the key."""
    return {name: value for name, value in msgspec.structs.asdict(group).items() if name != "name"}


def count_free_blocks(groups: Sequence[CacheGroup], num_superblocks: int) -> int:
    """Return the blocks in superblocks of no group, shared as sequences of max_model_len do."""
    needed = sum(g.blocks_per_sequence for g in groups)
    superblocks = sum(g.blocks_per_sequence / g.blocks_per_superblock for g in groups)
    return round(num_superblocks * needed / superblocks) if superblocks else 0


def _count_blocks(stats: CoreStats, ready: EngineReady) -> int:
    """Return the blocks that there are: own ones of all groups, and those in free superblocks."""
    own = sum(g.num_own_blocks for g in stats.groups)
    return own + count_free_blocks(ready.cache_groups, stats.num_free_superblocks)


def _find_fragmentation(stats: CoreStats, ready: EngineReady) -> float:
    held_bytes = owned_bytes = 0.0
    superblock_bytes = ready.startup.get("superblock_bytes", 0)
    for usage, group in zip(stats.groups, ready.cache_groups, strict=False):
        held_bytes += (usage.num_used_blocks + usage.num_cached_blocks) * group.block_bytes
        owned_bytes += usage.num_own_blocks // group.blocks_per_superblock * superblock_bytes
    return 1.0 - held_bytes / owned_bytes if owned_bytes else 0.0


def _hit_rate(stats: CoreStats) -> float:
    return stats.num_cache_hits / stats.num_cache_queries if stats.num_cache_queries else 0.0
