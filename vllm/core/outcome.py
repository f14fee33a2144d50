"""What the output of a step means: tokens taken in, ends, branches, blocks published.

Called by `core/scheduler.py` only, once for each step that returns.
"""

from __future__ import annotations

import msgspec

from vllm.core.cache_manager import CacheManager
from vllm.core.roster import Roster
from vllm.core.stop import check_stop
from vllm.sequence import Sequence, SequenceResult, SequenceStatus
from vllm.step import PlanRow, RowOutput, StepOutput, StepPlan, TokenLogprobs
from vllm.types import FinishReason


class OutcomeReader:
    """Applies step outputs to sequences.

    Attributes:
        num_generated_tokens: output tokens taken in so far.
    """

    def __init__(self, cache: CacheManager, roster: Roster) -> None:
        self._cache = cache
        self._roster = roster
        self._grain = cache.grain_tokens
        self.num_generated_tokens = 0

    def read(
        self,
        plan: StepPlan,
        sequences: list[Sequence],
        output: StepOutput,
        results: list[SequenceResult],
    ) -> None:
        """Take in one step; `sequences` are those of the plan's rows. Appends to `results`.

        A row whose sequence has ended in the meantime is an over-run: its tokens are dropped.
        """
        running = SequenceStatus.RUNNING
        has_index = self._cache.has_prefix_index
        for sequence, row, out in zip(sequences, plan.rows, output.rows, strict=True):
            sequence.num_in_flight -= 1
            status = sequence.status
            if status is not SequenceStatus.FINISHED:
                end = row.num_computed_tokens + row.num_new_tokens
                if out.error is not None:
                    self._cache.withhold(sequence.cache)
                elif has_index and end >= sequence.cache.num_published_tokens + self._grain:
                    self._cache.publish(sequence.cache, sequence.token_ids, end)
                self._read_row(sequence, row, out, results)
            if status is not running:
                self._roster.note_return(sequence)

    def _read_row(
        self, sequence: Sequence, row: PlanRow, out: RowOutput, results: list[SequenceResult]
    ) -> None:
        assert out.seq_id == sequence.seq_id, "output rows must be in the order of the plan"
        state = sequence.state
        if out.error is not None:
            result = self._make_result(sequence, [], out)
            results.append(result)
            self._roster.finish(sequence, FinishReason.ERROR, result=result, error=out.error)
            return
        if row.num_samples == 0:
            self._read_prompt_row(sequence, row, out, results)
            return
        token = out.token_ids[0]
        sequence.num_pending_tokens -= 1
        sequence.token_ids.append(token)
        self.num_generated_tokens += 1
        result = SequenceResult(state.request.request_id, sequence.branch, [token])
        results.append(result)
        result.num_cached_tokens = state.num_cached_tokens
        result.first_scheduled_time = state.first_scheduled_time
        if out.logprobs is not None:
            result.logprobs = out.logprobs[:1]
        if out.prompt_logprobs is not None:
            self._take_prompt_logprobs(sequence, out, result)
        if not state.is_forked:
            self._fork(sequence, out, results)
        stop = check_stop(sequence, token)
        if stop is not None:
            self._roster.finish(sequence, stop[0], result=result, stop_reason=stop[1])

    def _read_prompt_row(
        self, sequence: Sequence, row: PlanRow, out: RowOutput, results: list[SequenceResult]
    ) -> None:
        """Take in a chunk of a prompt; a request for no tokens at all ends with its last one."""
        num_tokens = len(sequence.token_ids)
        is_complete = row.num_computed_tokens + row.num_new_tokens == num_tokens
        ends = is_complete and num_tokens >= sequence.max_len
        if out.prompt_logprobs is None and not ends:
            return
        result = self._make_result(sequence, [], out)
        results.append(result)
        if ends:
            self._roster.finish(sequence, FinishReason.LENGTH, result=result)

    def _fork(self, sequence: Sequence, out: RowOutput, results: list[SequenceResult]) -> None:
        """Let the branches of a request begin, each with its own first token."""
        branches = self._roster.add_branches(sequence, out.token_ids)
        self.num_generated_tokens += len(branches)
        for child in branches:
            token = out.token_ids[child.branch]
            result = self._make_result(child, [token], None)
            if out.logprobs is not None:
                result.logprobs = [out.logprobs[child.branch]]
            results.append(result)
            stop = check_stop(child, token)
            if stop is not None:
                self._roster.finish(child, stop[0], result=result, stop_reason=stop[1])

    def _make_result(
        self, sequence: Sequence, token_ids: list[int], out: RowOutput | None
    ) -> SequenceResult:
        state = sequence.state
        result = SequenceResult(state.request.request_id, sequence.branch, token_ids)
        result.num_cached_tokens = state.num_cached_tokens
        result.first_scheduled_time = state.first_scheduled_time
        if out is not None and out.prompt_logprobs is not None:
            self._take_prompt_logprobs(sequence, out, result)
        return result

    def _take_prompt_logprobs(
        self, sequence: Sequence, out: RowOutput, result: SequenceResult
    ) -> None:
        """Pass on prompt logprobs, without what was delivered before a preemption."""
        entries: list[TokenLogprobs] = out.prompt_logprobs or []
        skip = max(0, sequence.num_prompt_logprobs_sent + 1 - out.prompt_start)
        fresh = entries[skip:]
        if not fresh:
            return
        result.prompt_logprobs = fresh
        result.prompt_start = out.prompt_start + skip
        sequence.num_prompt_logprobs_sent += len(fresh)
        if not sequence.wants_prompt_logprobs:
            sequence.sampling = msgspec.structs.replace(sequence.sampling, num_prompt_logprobs=None)
