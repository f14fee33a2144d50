"""The scheduler: what runs in the next step, and what the last one means.

Called by `engine/core.py`: `add` and `abort` at any moment, `schedule` to plan a step, `update` when
its output is back. Up to two steps may be on their way at once. It speaks token ids and block ids; it
never sees a tensor, a text or a device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from vllm.config import SchedulerConfig
from vllm.core.cache_manager import Admission, CacheManager, NewBlocks
from vllm.core.outcome import OutcomeReader
from vllm.core.policy import PromptDelay, make_policy
from vllm.core.prefix_index import NO_HIT, PrefixHit
from vllm.core.report import SchedulerStats
from vllm.core.roster import Roster
from vllm.errors import RequestError
from vllm.logger import init_logger
from vllm.sequence import Sequence, SequenceRequest, SequenceResult, SequenceStatus
from vllm.step import BlockCopy, NewRow, PlanRow, StepOutput, StepPlan
from vllm.types import FinishReason

logger = init_logger(__name__)

MAX_STEPS_IN_FLIGHT = 2
_PREEMPTIONS_PER_WARNING = 50
_LOOKAHEAD_STEPS = 4


class _Draft:
    """A step while it is planned."""

    __slots__ = ("budget", "copies", "decode_rows", "decodes", "is_short", "new_rows", "prefill_rows",
                 "prefills")  # fmt: skip

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.new_rows: list[NewRow] = []
        self.copies: list[BlockCopy] = []
        self.decodes: list[Sequence] = []
        self.decode_rows: list[PlanRow] = []
        self.prefills: list[Sequence] = []
        self.prefill_rows: list[PlanRow] = []
        # Some running sequence found no room: nobody may be admitted before it.
        self.is_short = False


class Scheduler:
    """Continuous batching under one token budget.

    Running sequences are served in rank order, so that the oldest never waits for a younger one; a
    sequence that finds no room takes it from the worst ranked ones, which are recomputed later.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._cache = cache
        self._clock = clock
        self._policy = make_policy(config.policy)
        self._roster = Roster(cache, self._policy, config.max_model_len)
        self._outcome = OutcomeReader(cache, self._roster)
        self._delay = PromptDelay(config.delay_factor)
        self._in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self._exclusive: Sequence | None = None
        self._num_steps = 0
        self._num_prompt_tokens = 0

    # -- requests ---------------------------------------------------------------------------------

    def add(self, request: SequenceRequest) -> None:
        """Accept a request.

        Raises:
            RequestError: it is malformed or could never be served, however long it waited.
        """
        num_prompt = len(request.prompt_token_ids)
        config = self._config
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
        if not self._cache.fits_empty(num_prompt, config.max_num_batched_tokens):
            raise RequestError(
                f"the prompt has {num_prompt} tokens, which the KV cache cannot hold even when it is "
                "empty; shorten the prompt or give the cache more memory",
                param="prompt",
            )
        self._roster.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request without further results; False if it is unknown or has ended."""
        return self._roster.abort(request_id)

    def abort_branch(self, request_id: str, branch: int) -> bool:
        """End one of the n branches of a request without further results; False if it is unknown."""
        return self._roster.abort_branch(request_id, branch)

    @property
    def has_unfinished(self) -> bool:
        """Whether some request has not ended, or results wait to be taken."""
        return bool(self._roster.requests) or self._roster.has_results or bool(self._in_flight)

    @property
    def num_steps_in_flight(self) -> int:
        """Steps that were planned and whose output has not come back."""
        return len(self._in_flight)

    def stats(self) -> SchedulerStats:
        """Return the state of queues and cache now."""
        cache, roster = self._cache, self._roster
        return SchedulerStats(
            num_running=len(roster.running),
            num_waiting=len(roster.waiting),
            num_preemptions=roster.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._outcome.num_generated_tokens,
            num_prefix_query_tokens=cache.num_query_tokens,
            num_prefix_hit_tokens=cache.num_hit_tokens,
            cache_usage=cache.usage,
            num_superblocks=cache.arena.num_superblocks,
            num_free_superblocks=cache.arena.num_free_superblocks,
            groups=cache.group_usage(),
        )

    # -- one step ---------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step.

        An empty plan need not be submitted; `update` must then not be called for it, but
        `take_results` may have something.
        """
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "a step must return before the next is planned"
        draft = _Draft(self._config.max_num_batched_tokens)
        if self._policy.preempts:
            self._yield_places(draft)
        self._schedule_running(draft)
        if not draft.is_short:
            self._schedule_waiting(draft)
        zero_superblocks = self._cache.finish_step()
        plan = StepPlan(
            step=self._num_steps,
            dropped=self._roster.take_dropped(),
            zero_superblocks=zero_superblocks,
            new_rows=draft.new_rows,
            copies=draft.copies,
            rows=draft.decode_rows + draft.prefill_rows,
        )
        if not plan.is_empty:
            self._num_steps += 1
            self._in_flight.append((plan, draft.decodes + draft.prefills))
        elif not draft.is_short and not self._in_flight and not self._roster.running:
            self._explain_stall()
        return plan

    def update(self, plan: StepPlan, output: StepOutput) -> list[SequenceResult]:
        """Take in the output of the oldest submitted step.

        Returns:
            What it means for each branch that got tokens, prompt logprobs or an end; results that no
            step brought come first.
        """
        expected, sequences = self._in_flight.popleft()
        assert plan.step == expected.step == output.step, "outputs must come back in order"
        assert len(output.rows) == len(sequences), "an output has one row for each row of its plan"
        results = self._roster.take_results()
        self._outcome.read(plan, sequences, output, results)
        return results

    def take_results(self) -> list[SequenceResult]:
        """Return results that no step brought (a sequence that found no room, a stall)."""
        return self._roster.take_results()

    def sampled_rows(self) -> Iterator[tuple[int, str, int]]:
        """Yield (sequence id, request id, branch) of the rows of the newest plan that get a token."""
        plan, sequences = self._in_flight[-1]
        for row, sequence in zip(plan.rows, sequences, strict=True):
            if row.num_samples:
                yield row.seq_id, sequence.state.request.request_id, sequence.branch

    # -- running sequences ------------------------------------------------------------------------

    def _schedule_running(self, draft: _Draft) -> None:
        """Plan a token for each decoding sequence and chunks of unfinished prompts, best rank first."""
        roster = self._roster
        running = roster.running
        rows, sequences = draft.decode_rows, draft.decodes
        no_blocks = self._cache.no_blocks
        # Decoding sequences come first: what they take is set aside before prompts get their chunks.
        prefill_budget = draft.budget - (len(running) - len(roster.prefilling))
        index = 0
        while index < len(running):
            sequence = running[index]
            computed = sequence.num_computed_tokens
            pending = sequence.num_pending_tokens
            remaining = len(sequence.token_ids) + pending - computed
            if remaining <= 0 or (pending and not _may_overlap(sequence)):
                index += 1
                continue
            if (
                remaining == 1
                and computed < sequence.cache.stable_tokens
                and computed >= sequence.num_prompt_tokens
                and sequence.is_resident
                and draft.budget > 0
            ):
                rows.append(
                    PlanRow(
                        seq_id=sequence.seq_id,
                        num_computed_tokens=computed,
                        num_new_tokens=1,
                        new_block_ids=no_blocks,
                    )
                )
                sequences.append(sequence)
                sequence.num_computed_tokens = computed + 1
                sequence.num_pending_tokens = pending + 1
                sequence.num_in_flight += 1
                draft.budget -= 1
            else:
                prefill_budget -= self._schedule_row(draft, sequence, remaining, prefill_budget)
            index += 1

    def _schedule_row(
        self, draft: _Draft, sequence: Sequence, remaining: int, prefill_budget: int
    ) -> int:
        """Plan a row that needs blocks or is not a plain decode; return the prefill budget it used."""
        is_prefill = sequence.seq_id in self._roster.prefilling
        num_new = min(remaining, draft.budget, prefill_budget if is_prefill else remaining)
        if num_new <= 0:
            return 0
        blocks = self._grow(draft, sequence, num_new)
        if blocks is None:
            draft.is_short = True
            return 0
        self._emit(draft, sequence, num_new, blocks)
        return num_new if is_prefill else 0

    def _grow(self, draft: _Draft, sequence: Sequence, num_new: int) -> NewBlocks | None:
        """Find blocks for a running sequence, from worse ranked ones if need be; None if it must wait."""
        roster = self._roster
        computed = sequence.num_computed_tokens
        while True:
            blocks = self._cache.extend(sequence.cache, computed, num_new, draft.copies)
            if blocks is not None:
                return blocks
            if roster.num_releasing:
                return None  # blocks are on their way: the step that computes their owner must return
            victim = roster.running[-1]
            if victim is not sequence:
                self._preempt(draft, victim)
            elif len(roster.running) > 1 or sequence.num_in_flight:
                return None  # better ranked sequences go on and will end or take this one's blocks
            else:
                self._restart_alone(draft, sequence, computed + num_new)
                return None

    def _restart_alone(self, draft: _Draft, sequence: Sequence, num_tokens: int) -> None:
        """Deal with a sequence that cannot grow although it runs alone and nothing is cached.

        Its own blocks are scattered over superblocks: recomputed in the drained arena, with admission
        closed, it fits, because one request of max_model_len was proven to fit at start-up. Where that
        proof was waived, it ends by length at what the arena holds.
        """
        fits = self._cache.fits_empty(num_tokens, self._config.max_num_batched_tokens)
        if fits and self._exclusive is not sequence:
            self._exclusive = sequence
            self._preempt(draft, sequence)
            return
        logger.warning(
            "Request %s ended at %d tokens: the KV cache holds no more. Give the cache more memory or "
            "lower max_model_len.",
            sequence.state.request.request_id,
            len(sequence.token_ids),
        )
        self._roster.finish(sequence, FinishReason.LENGTH)

    def _preempt(self, draft: _Draft, sequence: Sequence) -> None:
        draft.is_short = True
        self._roster.preempt(sequence)
        count = self._roster.num_preemptions
        if count % _PREEMPTIONS_PER_WARNING == 1:
            logger.warning(
                "Sequence %d of request %s lost its cache blocks to make room and will be recomputed "
                "(preemption %d). More cache memory or a smaller max_num_seqs avoids this.",
                sequence.seq_id,
                sequence.state.request.request_id,
                count,
            )

    # -- waiting sequences ------------------------------------------------------------------------

    def _schedule_waiting(self, draft: _Draft) -> None:
        """Admit waiting sequences in rank order until budget, seats or blocks run out."""
        while draft.budget > 0:
            sequence = self._next_waiting()
            if sequence is None:
                return
            if sequence.state.first_scheduled_time is None and not self._delay.allows(
                self._clock(),
                sequence.state.request.arrival_time,
                is_idle=not self._roster.running,
            ):
                return
            hit = self._match(sequence)
            admission = self._plan_admission(sequence, hit, draft.budget)
            if admission is None:
                return
            self._admit(draft, sequence, hit, admission)

    def _next_waiting(self) -> Sequence | None:
        """Return the sequence to admit next; while one is recomputed alone, only that one."""
        exclusive = self._exclusive
        if exclusive is not None:
            if exclusive.status is SequenceStatus.WAITING:
                return exclusive
            if exclusive.status is not SequenceStatus.FINISHED:
                return None
            self._exclusive = None
        return self._roster.waiting.peek()

    def _match(self, sequence: Sequence) -> PrefixHit:
        """Look up the cached prefix; prompt positions whose logprobs are wanted must be computed."""
        if sequence.wants_prompt_logprobs or not self._cache.has_prefix_index:
            return NO_HIT
        token_ids = sequence.token_ids
        return self._cache.match(sequence.cache, token_ids, len(token_ids) - 1)

    def _plan_admission(
        self, sequence: Sequence, hit: PrefixHit, budget: int
    ) -> Admission | None:
        """Return room for a waiting sequence, or None if seats, budget or blocks do not allow it now.

        A sequence enters only if all its tokens find room beside what unfinished prompts still need and
        a few steps of everybody who runs; each preemption it has suffered doubles those steps.
        """
        roster, config = self._roster, self._config
        state = sequence.state
        if roster.num_seats + state.num_seats > config.max_num_seqs:
            return None
        num_tokens = len(sequence.token_ids)
        remaining = num_tokens - hit.num_tokens
        num_new = min(remaining, budget)
        may_cut = config.enable_chunked_prefill or remaining > config.max_num_batched_tokens
        if num_new < remaining and not may_cut:
            return None
        goal, reserve = num_tokens, list(self._cache.growth_blocks(0))
        if roster.running:
            steps = _LOOKAHEAD_STEPS << min(sequence.num_preemptions, 5)
            goal = num_tokens + 1
            growth = self._cache.growth_blocks(steps * (len(roster.running) + state.num_seats))
            reserve = [sum(parts) for parts in zip(growth, self._unfinished_blocks(), strict=True)]
        return self._cache.plan_admission(
            hit,
            num_new,
            goal_tokens=goal,
            max_chunk=config.max_num_batched_tokens,
            reserve=reserve,
        )

    def _unfinished_blocks(self) -> list[int]:
        """Return, for each group, the blocks that admitted but unfinished prompts still need."""
        totals = list(self._cache.growth_blocks(0))
        for sequence in self._roster.prefilling.values():
            needs = self._cache.remaining_blocks(sequence.cache, len(sequence.token_ids) + 1)
            for group, need in enumerate(needs):
                totals[group] += need
        return totals

    def _admit(
        self, draft: _Draft, sequence: Sequence, hit: PrefixHit, admission: Admission
    ) -> None:
        state = sequence.state
        if state.first_scheduled_time is None:
            now = self._clock()
            state.first_scheduled_time = now
            state.num_cached_tokens = hit.num_tokens
            self._delay.note_prompt_step(now)
            self._num_prompt_tokens += sequence.num_prompt_tokens
            self._cache.record_query(sequence.num_prompt_tokens, hit)
        self._roster.start(sequence)
        self._cache.commit_admission(sequence.cache, admission)
        sequence.num_computed_tokens = hit.num_tokens
        self._emit(draft, sequence, admission.num_new, self._cache.no_blocks)

    def _yield_places(self, draft: _Draft) -> None:
        """Preempt running sequences that a better ranked waiting one cannot enter beside."""
        roster = self._roster
        while roster.running and not roster.num_releasing:
            waiting = self._next_waiting()
            worst = roster.running[-1]
            if waiting is None or worst.rank <= waiting.rank:
                return
            if self._plan_admission(waiting, self._match(waiting), draft.budget) is not None:
                return
            self._preempt(draft, worst)

    # -- rows -------------------------------------------------------------------------------------

    def _emit(
        self, draft: _Draft, sequence: Sequence, num_new: int, blocks: NewBlocks
    ) -> None:
        """Add a row whose blocks are there to the step."""
        computed = sequence.num_computed_tokens
        total = len(sequence.token_ids) + sequence.num_pending_tokens
        is_last = computed + num_new == total
        num_samples = 0
        if is_last and total < sequence.max_len:
            num_samples = sequence.state.num_seats
        if not sequence.is_resident:
            draft.new_rows.append(self._make_new_row(sequence))
            blocks = self._cache.no_blocks
        row = PlanRow(
            seq_id=sequence.seq_id,
            num_computed_tokens=computed,
            num_new_tokens=num_new,
            new_block_ids=blocks,
            num_samples=num_samples,
        )
        if num_new == 1:
            draft.decode_rows.append(row)
            draft.decodes.append(sequence)
        else:
            draft.prefill_rows.append(row)
            draft.prefills.append(sequence)
        if is_last:
            self._roster.prefilling.pop(sequence.seq_id, None)
        else:
            self._roster.prefilling[sequence.seq_id] = sequence
        sequence.num_computed_tokens = computed + num_new
        sequence.num_pending_tokens += 1 if num_samples else 0
        sequence.num_in_flight += 1
        draft.budget -= num_new

    def _make_new_row(self, sequence: Sequence) -> NewRow:
        sequence.is_resident = True
        return NewRow(
            seq_id=sequence.seq_id,
            branch=sequence.branch,
            token_ids=list(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=sequence.num_computed_tokens,
            block_ids=tuple(list(table) for table in sequence.cache.tables),
            sampling=sequence.sampling,
            logits_processors=sequence.state.request.logits_processors,
        )

    def _explain_stall(self) -> None:
        """Fail the first waiting request if nothing at all can run: it would wait for ever."""
        sequence = self._roster.waiting.peek()
        if sequence is None:
            return
        usage = self._cache.group_usage()
        error = (
            f"the request cannot be scheduled: {len(sequence.token_ids)} tokens, nothing else runs, "
            f"blocks held by group {({group.name: group.num_held_blocks for group in usage})}, "
            f"{self._cache.arena.num_free_superblocks} of {self._cache.arena.num_superblocks} "
            "superblocks free. This is a defect of the scheduler; please report it with this line"
        )
        logger.error("Request %s: %s", sequence.state.request.request_id, error)
        self._roster.finish(sequence, FinishReason.ERROR, error=error)


def _may_overlap(sequence: Sequence) -> bool:
    """Whether the next token may be planned although the last one is not back yet."""
    state = sequence.state
    return (
        state.is_forked
        and not state.request.needs_host_token
        and len(sequence.token_ids) + sequence.num_pending_tokens < sequence.max_len
    )
