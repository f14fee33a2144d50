"""One request on the caller's side, from its admission to its last output.

Owns the answers, the prompt's log-probabilities and the times; made and driven by
`engine/output_processor.py`. Knows nothing of other requests.
"""

from __future__ import annotations

import time

from vllm.engine.answer import Answer, make_logprobs
from vllm.engine.input_processor import ProcessedRequest
from vllm.engine.stats import FinishedRequest, IterationStats
from vllm.outputs import CompletionOutput, PromptLogprobs, RequestMetrics, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.sequence import SequenceResult
from vllm.step import TokenLogprobs
from vllm.transformers_utils.detokenizer import Detokenizer, TokenBytes, make_detokenizer
from vllm.types import FinishReason


class OpenRequest:
    """A request that has not ended.

    Attributes:
        params: a copy of the caller's.
        answers: its branches, by index.
        metrics: its times, filled in as they come.
    """

    def __init__(self, processed: ProcessedRequest, table: TokenBytes | None) -> None:
        """Open a request.

        Args:
            processed: the request as the input processor made it.
            table: bytes of the tokenizer's ids; None without a tokenizer.
        """
        request = processed.request
        self.request_id = processed.request_id
        self.prompt = processed.prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.params = processed.params
        self.metrics = RequestMetrics(
            arrival_time=request.arrival_time, last_token_time=request.arrival_time
        )
        self._table = table
        end_ids = frozenset(request.sampling.stop_token_ids)
        self.answers = [
            Answer(
                i, self.params, end_ids=end_ids, detokenizer=self._make_detokenizer(), table=table
            )
            for i in range(request.n)
        ]
        self._num_cached_tokens: int | None = None
        self._is_prompt_told = False
        self._prompt_logprobs: PromptLogprobs | None = None
        self._prompt_reader: Detokenizer | None = None
        if self.params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]
            if table is not None:
                self._prompt_reader = make_detokenizer(table, [], skip_special_tokens=False)
                self._prompt_reader.push(self.prompt_token_ids[:1])

    def _make_detokenizer(self) -> Detokenizer | None:
        if self._table is None or not self.params.detokenize:
            return None
        return make_detokenizer(
            self._table,
            self.prompt_token_ids,
            skip_special_tokens=self.params.skip_special_tokens,
            spaces_between_special_tokens=self.params.spaces_between_special_tokens,
        )

    @property
    def is_finished(self) -> bool:
        """Whether every answer has ended."""
        return all(a.has_ended for a in self.answers)

    @property
    def num_generation_tokens(self) -> int:
        """Generated tokens of all answers."""
        return sum(len(a.token_ids) for a in self.answers)

    def apply(self, result: SequenceResult, now_s: float, stats: IterationStats) -> bool:
        """Take what a step brought for one answer.

        Args:
            result: the step's result.
            now_s: when the step ended.
            stats: gets this request's share.
        Returns: whether the answer ended here while the engine side still runs it (a stop string).
        """
        if result.prompt_logprobs is not None:
            self._add_prompt_logprobs(result.prompt_start, result.prompt_logprobs)
        if result.first_scheduled_time is not None and self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = result.first_scheduled_time
            waited_s = max(0.0, result.first_scheduled_time - self.metrics.arrival_time)
            self.metrics.time_in_queue = waited_s
            stats.times_in_queue_s.append(waited_s)
        answer = self.answers[result.branch]
        if answer.has_ended:
            return False
        self._num_cached_tokens = result.num_cached_tokens
        if result.token_ids:
            self._record_times(len(result.token_ids), now_s, stats)
        return answer.apply(result)

    def _record_times(self, num_tokens: int, now_s: float, stats: IterationStats) -> None:
        metrics = self.metrics
        stats.num_generation_tokens += num_tokens
        if metrics.first_token_time is None:
            metrics.first_token_time = now_s
            stats.num_prompt_tokens += len(self.prompt_token_ids)
            stats.times_to_first_token_s.append(now_s - metrics.arrival_time)
        elif now_s != metrics.last_token_time:  # the n answers of a step count once
            stats.times_per_output_token_s.append(now_s - metrics.last_token_time)
        metrics.last_token_time = now_s

    def end(self, reason: FinishReason) -> None:
        """End every answer that still runs."""
        for answer in self.answers:
            if not answer.has_ended:
                answer.end(reason)

    def describe_end(self) -> FinishedRequest:
        """Return what the request was; its end is now."""
        self.metrics.finished_time = time.time()
        reason = self.answers[0].finish_reason
        assert reason is not None, "only an ended request is described"
        return FinishedRequest(
            reason=reason,
            num_prompt_tokens=len(self.prompt_token_ids),
            num_generation_tokens=self.num_generation_tokens,
            n=self.params.n,
            latency_s=self.metrics.finished_time - self.metrics.arrival_time,
        )

    def make_output(self, touched: list[int]) -> RequestOutput | None:
        """Return the output that is due after a step, None if nothing is.

        Args:
            touched: indices of the answers that the step changed.
        """
        kind = self.params.output_kind
        if kind is RequestOutputKind.DELTA:
            shows = self.params.logprobs is not None
            return self._wrap([self.answers[i].take_delta(shows_logprob=shows) for i in touched])
        if kind is RequestOutputKind.FINAL_ONLY and not self.is_finished:
            return None
        return self._wrap(self._best_answers())

    def _best_answers(self) -> list[CompletionOutput]:
        shows = self.params.logprobs is not None
        answers = self.answers
        if len(answers) > self.params.n:
            answers = sorted(answers, key=lambda a: a.cumulative_logprob, reverse=True)
            answers = answers[: self.params.n]
        return [a.make_output(shows_logprob=shows) for a in answers]

    def _wrap(self, outputs: list[CompletionOutput]) -> RequestOutput:
        is_told = self._is_prompt_told
        if self.params.output_kind is RequestOutputKind.DELTA:
            self._is_prompt_told = True
        return RequestOutput(
            request_id=self.request_id,
            prompt=None if is_told else self.prompt,
            prompt_token_ids=None if is_told else self.prompt_token_ids,
            prompt_logprobs=None if is_told else self._prompt_logprobs,
            outputs=outputs,
            finished=self.is_finished,
            metrics=self.metrics,
            num_cached_tokens=self._num_cached_tokens,
        )

    def _add_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        known = self._prompt_logprobs
        if known is None:
            return
        for position, entry in enumerate(entries, start):
            if position < len(known):
                continue  # computed again after a preemption
            pending = b"" if self._prompt_reader is None else self._prompt_reader.pending
            known.append(make_logprobs(entry, self._table, pending))
            if self._prompt_reader is not None:
                self._prompt_reader.push([self.prompt_token_ids[position]])
