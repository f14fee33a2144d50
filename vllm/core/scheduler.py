"""The scheduler: what runs in the next step, and what the last one means.

Called by `engine/core.py`: `add` and `abort` at any moment, `schedule` to plan a step, `update`
when its output is back. A step may be planned while the one before still runs; its rows go on from
tokens that nobody has seen yet. It speaks token ids and block ids; it never sees a tensor, a text
or a device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from vllm.config import SchedulerConfig
from vllm.core.admission import Doorkeeper, check_servable
from vllm.core.cache_manager import CacheManager, NewBlocks
from vllm.core.draft import StepDraft
from vllm.core.outcome import OutcomeReader
from vllm.core.policy import make_policy
from vllm.core.report import SchedulerStats
from vllm.core.roster import Roster
from vllm.logger import init_logger
from vllm.sequence import Sequence, SequenceRequest, SequenceResult
from vllm.step import PlanRow, StepOutput, StepPlan
from vllm.types import FinishReason

logger = init_logger(__name__)

_PREEMPTIONS_PER_WARNING = 50


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
        self._policy = make_policy(config.policy)
        self._roster = Roster(cache, self._policy, config.max_model_len)
        self._outcome = OutcomeReader(cache, self._roster)
        self._doorkeeper = Doorkeeper(config, cache, self._roster, clock)
        self._in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self._num_steps = 0
        self._num_prompt_tokens = 0

    def add(self, request: SequenceRequest) -> None:
        """Accept a request.

        Raises:
            RequestError: it is malformed or could never be served, however long it waited.
        """
        check_servable(request, self._config, self._cache)
        self._roster.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request without further results; False if it is unknown or has ended."""
        return self._roster.abort(request_id)

    def abort_branch(self, request_id: str, branch: int) -> bool:
        """End one branch of a request without further results; False if it is unknown."""
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
        num_running_requests = len({sequence.state for sequence in roster.running})
        return SchedulerStats(
            num_running=len(roster.running),
            num_waiting=len(roster.waiting),
            num_running_requests=num_running_requests,
            num_waiting_requests=len(roster.requests) - num_running_requests,
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

    def schedule(self) -> StepPlan:
        """Plan the next step.

        An empty plan need not be submitted; `update` must then not be called for it, but
        `take_results` may have something. While a step is in flight, empty may mean that it must
        return first.
        """
        assert len(self._in_flight) < self._config.max_steps_in_flight, (
            "a step must return before the next is planned"
        )
        if self._in_flight and any(map(_must_see_token, self._roster.running)):
            return StepPlan(step=self._num_steps)
        budget = self._config.max_num_batched_tokens
        draft = StepDraft(budget, self._roster, self._cache.no_blocks)
        if self._policy.preempts:
            self._yield_places(budget)
        if not self._is_prompt_step():
            self._schedule_running(draft)
        if not draft.is_short:
            self._schedule_waiting(draft)
        plan = draft.make_plan(self._num_steps, self._cache.finish_step(draft.copies))
        if not plan.is_empty:
            self._num_steps += 1
            self._in_flight.append((plan, draft.sequences))
        elif not draft.is_short and not (self._in_flight or self._roster.running):
            self._resolve_stall()
        return plan

    def update(self, plan: StepPlan, output: StepOutput) -> list[SequenceResult]:
        """Take in the output of the oldest submitted step.

        Returns:
            What it means for each branch that got tokens, prompt logprobs or an end; results that
            no step brought come first.
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
        """Yield (sequence id, request id, branch) of the newest plan's rows that get a token."""
        plan, sequences = self._in_flight[-1]
        for row, sequence in zip(plan.rows, sequences, strict=True):
            if row.num_samples:
                yield row.seq_id, sequence.state.request.request_id, sequence.branch

    def _schedule_running(self, draft: StepDraft) -> None:
        """Plan a token for each decoding sequence and chunks of prompts, best rank first."""
        roster = self._roster
        running = roster.running
        rows, sequences = draft.decode_rows, draft.decodes
        no_blocks = self._cache.no_blocks
        # Decoding sequences come first: what they take is set aside before prompts get their
        # chunks.
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
        self, draft: StepDraft, sequence: Sequence, remaining: int, prefill_budget: int
    ) -> int:
        """Plan a row that is not a plain decode; return the prefill budget it used."""
        is_prefill = sequence.seq_id in self._roster.prefilling
        num_new = min(remaining, draft.budget, prefill_budget if is_prefill else remaining)
        if num_new <= 0:
            return 0
        num_new = self._cache.cut_chunk(sequence.cache, sequence.num_computed_tokens, num_new)
        blocks = self._grow(draft, sequence, num_new)
        if blocks is None:
            draft.is_short = True
            return 0
        draft.add_row(sequence, num_new, blocks)
        return num_new if is_prefill else 0

    def _grow(self, draft: StepDraft, sequence: Sequence, num_new: int) -> NewBlocks | None:
        """Find blocks for a running sequence, from worse ranked ones if need be.

        None if it must wait.
        """
        roster = self._roster
        computed = sequence.num_computed_tokens
        while True:
            blocks = self._cache.extend(sequence.cache, computed, num_new, draft.copies)
            if blocks is not None:
                return blocks
            if roster.num_releasing:
                return None  # blocks come with the step that still computes their owner
            victim = roster.running[-1]
            if victim is not sequence:
                draft.is_short = True
                self._preempt(victim)
            elif len(roster.running) > 1 or sequence.num_in_flight:
                return None  # better ranked sequences go on and will end or take this one's blocks
            else:
                self._restart_alone(sequence, computed + num_new)
                return None

    def _restart_alone(self, sequence: Sequence, num_tokens: int) -> None:
        """Deal with a sequence that cannot grow although it runs alone and nothing is cached.

        Its own blocks are scattered over superblocks: recomputed in the drained arena, with
        admission closed and nothing cached, it fits, because one request of max_model_len was
        proven to fit at start-up. Where that proof was waived, it ends by length at what the arena
        holds.
        """
        fits = self._cache.fits_empty(num_tokens, self._config.max_num_batched_tokens)
        if fits and self._doorkeeper.exclusive is not sequence:
            self._doorkeeper.exclusive = sequence
            self._preempt(sequence)
            self._cache.reset_prefix_cache()
            return
        self._end_at_capacity(sequence)

    def _end_at_capacity(self, sequence: Sequence) -> None:
        logger.warning(
            "Request %s ended at %d tokens: the KV cache holds no more. Give the cache more memory "
            "or lower max_model_len.",
            sequence.state.request.request_id,
            len(sequence.token_ids),
        )
        self._roster.finish(sequence, FinishReason.LENGTH)

    def _preempt(self, sequence: Sequence) -> None:
        self._roster.preempt(sequence)
        count = self._roster.num_preemptions
        if count % _PREEMPTIONS_PER_WARNING == 1:
            logger.warning(
                "Sequence %d of request %s lost its cache blocks to make room and will be "
                "recomputed (preemption %d). More cache memory or fewer max_num_seqs avoid this.",
                sequence.seq_id,
                sequence.state.request.request_id,
                count,
            )

    def _schedule_waiting(self, draft: StepDraft) -> None:
        """Admit waiting sequences in rank order until budget, seats or blocks run out."""
        while draft.budget > 0:
            entry = self._doorkeeper.plan_entry(draft.budget, may_cut=draft.may_begin_cut)
            if entry is None:
                return
            sequence = entry.sequence
            if sequence.state.first_scheduled_time is None:
                self._num_prompt_tokens += sequence.num_prompt_tokens
            self._doorkeeper.note_entry(entry)
            self._roster.start(sequence)
            self._cache.commit_admission(
                sequence.cache,
                entry.admission,
                may_publish=sequence is not self._doorkeeper.exclusive,
            )
            sequence.num_computed_tokens = entry.admission.num_computed
            draft.add_row(sequence, entry.admission.num_new, self._cache.no_blocks)

    def _yield_places(self, budget: int) -> None:
        """Preempt running sequences that a better ranked waiting one cannot enter beside."""
        roster = self._roster
        while roster.running and not roster.num_releasing:
            waiting = self._doorkeeper.next_waiting()
            worst = roster.running[-1]
            if waiting is None or worst.rank <= waiting.rank:
                return
            if self._doorkeeper.plan_entry(budget) is not None:
                return
            self._preempt(worst)

    def _is_prompt_step(self) -> bool:
        """Whether decoding must pause for a prompt that may not be cut and fits only alone."""
        budget, roster = self._config.max_num_batched_tokens, self._roster
        if self._config.enable_chunked_prefill or not roster.running or roster.prefilling:
            return False
        beside = self._doorkeeper.plan_entry(budget - len(roster.running))
        return beside is None and self._doorkeeper.plan_entry(budget) is not None

    def _resolve_stall(self) -> None:
        """End the first waiting sequence if nothing at all can run: it would wait for ever."""
        sequence = self._roster.waiting.peek()
        if sequence is None:
            return
        num_tokens = len(sequence.token_ids)
        if not self._cache.fits_empty(num_tokens, self._config.max_num_batched_tokens):
            self._end_at_capacity(sequence)
            return
        held = {usage.name: usage.num_held_blocks for usage in self._cache.group_usage()}
        error = (
            f"the request cannot be scheduled: {num_tokens} tokens, nothing else "
            f"runs, blocks held by group {held}, "
            f"{self._cache.arena.num_free_superblocks} of {self._cache.arena.num_superblocks} "
            "superblocks free. This is a defect of the scheduler; please report it with this line"
        )
        logger.error("Request %s: %s", sequence.state.request.request_id, error)
        self._roster.finish(sequence, FinishReason.ERROR, error=error)


def _may_overlap(sequence: Sequence) -> bool:
    """Whether the next token may be planned although the last one is not back yet.

    Not where it is known that there will be none, and not before the branches are there.
    """
    return (
        sequence.state.is_forked
        and len(sequence.token_ids) + sequence.num_pending_tokens < sequence.max_len
    )


def _must_see_token(sequence: Sequence) -> bool:
    """Whether no step may be planned before the last token is back.

    The sequence is not left out of a step instead: it would get every second step only.
    """
    return (
        sequence.num_pending_tokens > 0
        and sequence.state.request.needs_host_token
        and len(sequence.token_ids) + sequence.num_pending_tokens < sequence.max_len
    )
