"""Limits and policy of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and the order of requests.

    Attributes:
        max_num_batched_tokens: token budget of one step.
        max_num_seqs: most sequences in one step, each of n branches counted.
        policy: "fcfs" or "priority".
        enable_chunked_prefill: whether a prompt may be cut over several steps.
        delay_factor: wait this times the last prompt's latency before admitting a new prompt.
        max_steps_in_flight: 1 plans a step when the one before has returned, 2 while it runs.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    delay_factor: float = 0.0
    max_steps_in_flight: int = 1
