"""Who may enter: what is refused outright, and when a waiting sequence finds room.

Called by `core/scheduler.py`. It plans admissions and changes nothing; the scheduler carries them
out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm.config import SchedulerConfig
from vllm.core.cache_manager import CacheManager
from vllm.core.placement import Admission
from vllm.core.policy import PromptDelay
from vllm.core.prefix_index import NO_HIT, PrefixHit
from vllm.core.roster import Roster
from vllm.errors import RequestError
from vllm.sequence import Sequence, SequenceRequest, SequenceStatus

_MAX_LOOKAHEAD_DOUBLINGS = 7


def check_servable(request: SequenceRequest, config: SchedulerConfig, cache: CacheManager) -> None:
    """Refuse what could never be served, however long it waited.

    Raises:
        RequestError: with what was given and what is allowed.
    """
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise RequestError("the prompt has no tokens; give at least one", param="prompt")
    if num_prompt > config.max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, but max_model_len is {config.max_model_len}; "
            "shorten the prompt",
            param="prompt",
        )
    if not config.enable_chunked_prefill and num_prompt > config.max_num_batched_tokens:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, but without chunked prefill at most "
            f"max_num_batched_tokens = {config.max_num_batched_tokens} can be computed; shorten "
            "the prompt or enable chunked prefill",
            param="prompt",
        )
    if not 1 <= request.n <= config.max_num_seqs:
        raise RequestError(
            f"n (or best_of) is {request.n}; it must be from 1 to max_num_seqs = "
            f"{config.max_num_seqs}",
            param="n",
        )
    if not cache.fits_empty(num_prompt, config.max_num_batched_tokens):
        raise RequestError(
            f"the prompt has {num_prompt} tokens, which the KV cache cannot hold even when it is "
            "empty; shorten the prompt or give the cache more memory",
            param="prompt",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Room for one waiting sequence.

    Attributes:
        sequence: who may enter.
        hit: the cached prefix it resumes from.
        admission: its blocks.
    """

    sequence: Sequence
    hit: PrefixHit
    admission: Admission


class Doorkeeper:
    """Decides which waiting sequence enters next.

    Attributes:
        exclusive: a sequence that is recomputed in the drained arena; nobody else enters until it
        ends.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        roster: Roster,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._cache = cache
        self._roster = roster
        self._clock = clock
        self._delay = PromptDelay(config.delay_factor)
        self._refused: tuple[int, int, int] | None = None
        self.exclusive: Sequence | None = None

    def next_waiting(self) -> Sequence | None:
        """Return the waiting sequence of best rank that may enter at all."""
        exclusive = self.exclusive
        if exclusive is not None:
            if exclusive.status is SequenceStatus.WAITING:
                return exclusive
            if exclusive.status is not SequenceStatus.FINISHED:
                return None
            self.exclusive = None
        return self._roster.waiting.peek()

    def plan_entry(self, budget: int, *, may_cut: bool = True) -> Entry | None:
        """Return room for the next waiting sequence within `budget` tokens, or None.

        Nobody overtakes a sequence that finds no room.

        Args:
            budget: tokens of its first chunk at most.
            may_cut: whether this may be a part of what a whole step could take.
        """
        sequence = self.next_waiting()
        if sequence is None:
            return None
        state, roster = sequence.state, self._roster
        if roster.num_seats + state.num_seats > self._config.max_num_seqs:
            return None
        if state.first_scheduled_time is None and not self._delay.allows(
            self._clock(), state.request.arrival_time, is_idle=not roster.running
        ):
            return None
        attempt = (sequence.seq_id, self._cache.arena.num_releases, len(roster.running))
        if self._refused == attempt:
            return None  # no block has become free since, and none is reserved for fewer others
        hit = self._match(sequence)
        remaining = len(sequence.token_ids) - hit.num_tokens
        must_cut = remaining > self._config.max_num_batched_tokens
        may_cut = must_cut or (may_cut and self._config.enable_chunked_prefill)
        if budget < remaining and not may_cut:
            return None
        admission = self._plan_admission(sequence, hit, min(remaining, budget))
        if admission is None and hit.num_tokens and not roster.running:
            # The blocks of the hit are scattered so that the rest finds no superblock beside them.
            hit = NO_HIT
            admission = self._plan_admission(sequence, hit, min(len(sequence.token_ids), budget))
        if admission is None:
            self._refused = attempt
            return None
        return Entry(sequence=sequence, hit=hit, admission=admission)

    def note_entry(self, entry: Entry) -> None:
        """Record that a sequence enters now: times and hit statistics of its request."""
        state = entry.sequence.state
        if state.first_scheduled_time is not None:
            return
        now = self._clock()
        state.first_scheduled_time = now
        state.num_cached_tokens = entry.hit.num_tokens
        self._delay.note_prompt_step(now)
        self._cache.record_query(entry.sequence.num_prompt_tokens, entry.hit)

    def _match(self, sequence: Sequence) -> PrefixHit:
        """Look up the cached prefix; prompt logprobs need their positions computed."""
        if sequence.wants_prompt_logprobs or not self._cache.has_prefix_index:
            return NO_HIT
        token_ids = sequence.token_ids
        return self._cache.match(sequence.cache, token_ids, len(token_ids) - 1)

    def _plan_admission(self, sequence: Sequence, hit: PrefixHit, num_new: int) -> Admission | None:
        """Return blocks for a waiting sequence, or None.

        It enters only if all its tokens find room beside the next step of everybody who runs; each
        preemption it has suffered doubles that one step. (Unfinished prompts need no reserve: while
        one runs, it takes what is left of the budget.)
        """
        roster, cache = self._roster, self._cache
        goal = len(sequence.token_ids)
        reserve = cache.growth_blocks(0)
        if roster.running:
            goal += 1
            steps = 1 << min(sequence.num_preemptions, _MAX_LOOKAHEAD_DOUBLINGS)
            num_rows = len(roster.running) + sequence.state.num_seats
            reserve = cache.growth_blocks(steps * num_rows)
        return cache.plan_admission(
            sequence.cache,
            hit,
            cache.cut_chunk(sequence.cache, hit.num_tokens, num_new),
            goal_tokens=goal,
            max_chunk=self._config.max_num_batched_tokens,
            reserve=reserve,
        )
