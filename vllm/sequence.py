"""Requests and sequences as token ids, limits and cache blocks: what the scheduler works on.

The engine builds a :class:`SequenceRequest` from a text request, the scheduler keeps one
:class:`Sequence` for each of its n branches and answers with :class:`SequenceResult`. No text, no
tensor and no torch here; stop strings and detokenising belong to the caller's process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from vllm.outputs import Logprob, PromptLogprobs, RequestMetrics, SampleLogprobs
from vllm.step import RowSampling, TokenLogprobs
from vllm.types import FinishReason

__all__ = [
    "NO_BLOCK",
    "Logprob",
    "PromptLogprobs",
    "RequestMetrics",
    "RequestState",
    "SampleLogprobs",
    "Sequence",
    "SequenceCache",
    "SequenceRequest",
    "SequenceResult",
    "SequenceStatus",
]

NO_BLOCK = -1
"""Entry of a block table behind which nothing is stored."""


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, tokenised and resolved.

    Attributes:
        n: branches to generate from the prompt (best_of where that is larger).
        max_tokens: most output tokens of a branch; None means up to max_model_len. 0 computes the
            prompt only.
        eos_token_id: ends a branch with no stop reason; None when there is none or it is ignored.
        stop_token_ids: each ends a branch, the id being the stop reason.
        priority: smaller is served earlier (policy "priority" only).
        arrival_time: seconds since the epoch.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        needs_host_token: each token must be known to engine and workers before the next step is
            planned (grammar, user logits processors, rules that read the output).
        logits_processors: user callables, in-process engine only.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: RowSampling
    n: int = 1
    max_tokens: int | None = None
    eos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    arrival_time: float = msgspec.field(default_factory=time.time)
    cache_salt: str = ""
    needs_host_token: bool = False
    logits_processors: tuple[Callable[..., Any], ...] = ()


class SequenceResult(msgspec.Struct, array_like=True):
    """What one step means for one branch.

    Attributes:
        token_ids: new output tokens, the ending one included.
        logprobs: one entry for each new token, or None.
        prompt_logprobs: entries for the prompt tokens from index `prompt_start` on, or None.
        finish_reason: None while the branch goes on.
        stop_reason: the stop token id that ended it; None for EOS and everything else.
        num_cached_tokens: prompt tokens of the request that came from the prefix cache.
        first_scheduled_time: when the request first entered a step, seconds since the epoch.
        error: what went wrong, with finish reason "error".
    """

    request_id: str
    branch: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_start: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None
    error: str | None = None


class SequenceStatus(Enum):
    """Where a sequence stands.

    DRAINING: preempted while a step that computes it was still running; it joins the waiting
    sequences when that step has returned.
    """

    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True)
class CheckpointTrail:
    """Checkpoints of a sequence; changed by `core/checkpoint.py` only.

    Attributes:
        marks: positions among its known tokens that deserve a checkpoint, ascending.
        unlisted: (position, blocks) of copies planned that are not in the prefix index yet.
        newest: the last one made while it generated, which the next replaces.
        kept_until: position up to which rows are kept, though dead, until they are published.
    """

    marks: tuple[int, ...] = ()
    unlisted: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    newest: tuple[int, tuple[int, ...]] | None = None
    kept_until: int = 0


@dataclass(slots=True, kw_only=True)
class SequenceCache:
    """What a sequence holds in the KV cache; changed by the cache manager only.

    Attributes:
        salt: part of the key of its prefixes.
        tables: for each group, block ids by position; NO_BLOCK where nothing is stored.
        num_dead: for each group, leading table entries that have been given back.
        copy_sources: for each group, shared blocks whose content the entries after the table must
            start with (copy-on-write after a fork); empty when no group has any.
        stable_tokens: lengths up to this one need no change of any table.
        generation: of the prefix index, when the sequence entered; after a reset it publishes
            nothing.
        num_published_tokens: tokens whose blocks have been offered to the prefix index.
        chain: (digest, token bytes) of each full grain of the token history, as far as computed.
        duplicates: grains whose content the index already had in another sequence's blocks.
        goal: see NewRow.
        trail: its checkpoints.
    """

    salt: str = ""
    tables: list[list[int]] = field(default_factory=list)
    num_dead: list[int] = field(default_factory=list)
    copy_sources: list[list[int]] = field(default_factory=list)
    stable_tokens: int = 0
    generation: int = 0
    num_published_tokens: int = 0
    chain: list[tuple[bytes, bytes]] = field(default_factory=list)
    duplicates: list[int] = field(default_factory=list)
    goal: int | None = None
    trail: CheckpointTrail = field(default_factory=CheckpointTrail)


class RequestState:
    """One request inside the scheduler.

    Attributes:
        request: what was asked.
        order: number of the request, counted as they were added.
        stop_token_ids: as in the request.
        sequences: its branches that have not ended.
        is_forked: whether the n branches exist (from the end of the prompt on).
        first_scheduled_time: None before it first entered a step.
        num_cached_tokens: prefix hit of its first admission.
    """

    __slots__ = (
        "first_scheduled_time", "is_forked", "num_cached_tokens", "order", "request", "sequences",
        "stop_token_ids",
    )  # fmt: skip

    def __init__(self, request: SequenceRequest, order: int) -> None:
        self.request = request
        self.order = order
        self.stop_token_ids = frozenset(request.stop_token_ids)
        self.sequences: list[Sequence] = []
        self.is_forked = request.n == 1
        self.first_scheduled_time: float | None = None
        self.num_cached_tokens = 0

    @property
    def num_seats(self) -> int:
        """Rows that an unforked request will need."""
        return 1 if self.is_forked else self.request.n


class Sequence:
    """One branch of a request.

    Attributes:
        seq_id: unique for the life of the scheduler.
        token_ids: prompt and outputs known to the host.
        num_computed_tokens: cache rows that exist once every submitted step has run.
        num_pending_tokens: output tokens that submitted steps will still bring.
        num_in_flight: submitted steps that have this sequence as a row and have not returned.
        is_resident: whether the workers hold a row of it.
        rank: order among sequences; the smallest is served first and preempted last.
        max_len: tokens at which it ends with reason "length".
        num_prompt_logprobs_sent: prompt positions whose logprobs have been delivered.
    """

    __slots__ = (
        "branch", "cache", "is_resident", "max_len", "num_computed_tokens", "num_in_flight",
        "num_pending_tokens", "num_preemptions", "num_prompt_logprobs_sent", "num_prompt_tokens",
        "rank", "sampling", "seq_id", "state", "status", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        *,
        seq_id: int,
        state: RequestState,
        branch: int,
        token_ids: list[int],
        max_len: int,
        rank: tuple[float, ...],
        sampling: RowSampling,
    ) -> None:
        self.seq_id = seq_id
        self.state = state
        self.branch = branch
        self.token_ids = token_ids
        self.num_prompt_tokens = len(state.request.prompt_token_ids)
        self.max_len = max_len
        self.rank = rank
        self.sampling = sampling
        self.status = SequenceStatus.WAITING
        self.cache = SequenceCache(salt=state.request.cache_salt)
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.num_in_flight = 0
        self.num_preemptions = 0
        self.num_prompt_logprobs_sent = 0
        self.is_resident = False

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions still have to be computed for their logprobs."""
        return (
            self.sampling.num_prompt_logprobs is not None
            and self.num_prompt_logprobs_sent < self.num_prompt_tokens - 1
        )
