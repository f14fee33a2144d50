"""Numbers about the scheduler and the cache at one moment, for logs, /stats and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.core.cache_manager import GroupUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """One snapshot; counters count from the start of the engine.

    Attributes:
        num_running, num_waiting: sequences, branches counted.
        num_preemptions: sequences that lost their place so far.
        num_prompt_tokens: prompt tokens of requests admitted so far, cached ones included.
        num_generated_tokens: output tokens so far.
        num_prefix_query_tokens, num_prefix_hit_tokens: prompt tokens looked up and found in the cache.
        cache_usage: share of the arena held by running sequences, 0 to 1.
        groups: where the blocks of each cache group are.
    """

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    cache_usage: float
    num_superblocks: int
    num_free_superblocks: int
    groups: tuple[GroupUsage, ...]
