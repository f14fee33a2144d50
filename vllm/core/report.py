"""Numbers about the scheduler and the cache at one moment, for logs, /stats and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.cache_spec import CacheLayout
from vllm.core.block.arena import SuperblockArena


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUsage:
    """Where the blocks of one group are.

    Attributes:
        num_held_blocks: blocks of sequences that run.
        num_cached_blocks: blocks kept only for prefix hits; they are given up when room is needed.
        num_free_slots: unused slots in the group's own superblocks.
    """

    name: str
    block_tokens: int
    blocks_per_superblock: int
    num_superblocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_free_slots: int


def describe_groups(layout: CacheLayout, arena: SuperblockArena) -> tuple[GroupUsage, ...]:
    """Return where the blocks of each group are now."""
    return tuple(
        GroupUsage(
            name=group.name,
            block_tokens=group.block_tokens,
            blocks_per_superblock=group.blocks_per_superblock,
            num_superblocks=arena.num_owned_superblocks(g),
            num_held_blocks=arena.num_held_blocks(g),
            num_cached_blocks=arena.num_cached_blocks(g),
            num_free_slots=arena.num_free_slots[g],
        )
        for g, group in enumerate(layout.groups)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """One snapshot; counters count from the start of the engine.

    Attributes:
        num_running, num_waiting: sequences, branches counted.
        num_running_requests, num_waiting_requests: requests; one with a running branch runs.
        num_preemptions: sequences that lost their place so far.
        num_prompt_tokens: prompt tokens of requests admitted so far, cached ones included.
        num_generated_tokens: output tokens so far.
        num_prefix_query_tokens, num_prefix_hit_tokens: prompt tokens looked up in the prefix index,
            and found.
        cache_usage: share of the arena held by running sequences, 0 to 1.
        groups: where the blocks of each cache group are.
    """

    num_running: int
    num_waiting: int
    num_running_requests: int
    num_waiting_requests: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    cache_usage: float
    num_superblocks: int
    num_free_superblocks: int
    groups: tuple[GroupUsage, ...]
