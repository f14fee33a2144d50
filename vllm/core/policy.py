"""The order of requests: ranks, the waiting queue, and the delay before new prompts.

Called by `core/scheduler.py`. A policy only ranks; it looks at no block and no budget. The smallest
rank is served first and preempted last.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod

from vllm.errors import ConfigError
from vllm.sequence import Sequence, SequenceRequest, SequenceStatus


class Policy(ABC):
    """Ranks sequences.

    Attributes:
        preempts: whether a waiting sequence takes the place of a running one of worse rank.
    """

    preempts = False

    @abstractmethod
    def rank(self, request: SequenceRequest, order: int, branch: int) -> tuple[float, ...]:
        """Return the rank of a branch; `order` counts requests as they were added."""


class FcfsPolicy(Policy):
    """First come, first served."""

    def rank(self, request: SequenceRequest, order: int, branch: int) -> tuple[float, ...]:
        """Rank by order of addition."""
        return (order, branch)


class PriorityPolicy(Policy):
    """Smaller priority first, then earlier arrival."""

    preempts = True

    def rank(self, request: SequenceRequest, order: int, branch: int) -> tuple[float, ...]:
        """Rank by priority, arrival time and order of addition."""
        return (request.priority, request.arrival_time, order, branch)


POLICIES: dict[str, type[Policy]] = {"fcfs": FcfsPolicy, "priority": PriorityPolicy}


def make_policy(name: str) -> Policy:
    """Return the policy of a name; ConfigError if there is none."""
    if name not in POLICIES:
        raise ConfigError(f"scheduling policy '{name}' is unknown; choose from {sorted(POLICIES)}")
    return POLICIES[name]()


class WaitingQueue:
    """Waiting sequences by rank."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, Sequence]] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        sequence.status = SequenceStatus.WAITING
        self._members.add(sequence.seq_id)
        heapq.heappush(self._heap, (sequence.rank, sequence.seq_id, sequence))

    def peek(self) -> Sequence | None:
        """Return the sequence that is served next, or None."""
        while self._heap:
            sequence = self._heap[0][2]
            if sequence.seq_id in self._members:
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands; nothing happens if it is not waiting."""
        self._members.discard(sequence.seq_id)
        if self._heap and self._heap[0][2] is sequence:
            heapq.heappop(self._heap)


class PromptDelay:
    """Holds new prompts back for a while so that they enter together.

    A new prompt waits until the earliest one has waited `factor` times as long as the last step
    with a new prompt took, unless nothing runs.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last_latency_s = 0.0
        self._prompt_step_time: float | None = None

    def allows(self, now: float, earliest_arrival: float, *, is_idle: bool) -> bool:
        """Whether new prompts may enter now."""
        if self._prompt_step_time is not None:
            self._last_latency_s = now - self._prompt_step_time
            self._prompt_step_time = None
        if self._factor <= 0 or is_idle:
            return True
        return now - earliest_arrival > self._factor * self._last_latency_s

    def note_prompt_step(self, now: float) -> None:
        """Record that the step planned at `now` admits a new prompt."""
        self._prompt_step_time = now
