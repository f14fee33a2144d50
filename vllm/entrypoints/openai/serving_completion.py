"""POST /v1/completions: from the body to a response or a stream of events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import msgspec

from vllm.entrypoints.openai.completion_request import CompletionRequest
from vllm.entrypoints.openai.event_stream import EventGenerator, EventStream, open_stream
from vllm.entrypoints.openai.logprobs import render_prompt_logprobs
from vllm.entrypoints.openai.response import (
    CompletionLogProbs,
    CompletionResponse,
    CompletionResponseChoice,
    encode_event,
    unix_time,
)
from vllm.entrypoints.openai.serving_engine import Prompt, ServingEngine, UsageCounter
from vllm.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from vllm.utils.merged_stream import merge_streams


@dataclass(slots=True)
class _Run:
    """One HTTP request while it runs."""

    request: CompletionRequest
    response_id: str
    prompts: Sequence[Prompt]
    created: int = field(default_factory=unix_time)
    usage: UsageCounter = field(default_factory=UsageCounter)

    @property
    def is_scoring(self) -> bool:
        """Whether nothing is generated: the prompt is echoed or scored only."""
        return self.request.max_tokens == 0


class OpenAIServingCompletion:
    """The completions endpoint."""

    def __init__(self, serving: ServingEngine) -> None:
        self._serving = serving

    async def create_completion(
        self, request: CompletionRequest, request_id: str
    ) -> CompletionResponse | EventStream:
        """Answer one request.

        Raises: ApiError, RequestError, EngineDeadError; all before the first event of a stream.
        """
        self._serving.check_request(request.model)
        prompts = [await self._prepare(request, given) for given in request.prompts]
        run = _Run(request, f"cmpl-{request_id}", prompts)
        for prompt in prompts:
            self._serving.limit_tokens(prompt, request.max_tokens, param="max_tokens")
            run.usage.add_prompt(len(prompt.token_ids))
        if not request.stream:
            return await self._respond(run)
        if request.use_beam_search or run.is_scoring:
            return await open_stream(self._replay(run, await self._respond(run)))
        return await open_stream(self._stream(run))

    async def _prepare(self, request: CompletionRequest, given: str | list[int]) -> Prompt:
        truncate = request.truncate_prompt_tokens
        if isinstance(given, str):
            prompt = await self._serving.encode_text(
                given, add_special_tokens=request.add_special_tokens, truncate=truncate
            )
        else:
            prompt = self._serving.take_token_ids(given, truncate=truncate)
        if request.cache_salt is None:
            return prompt
        return prompt.with_salt(request.cache_salt)

    async def _respond(self, run: _Run) -> CompletionResponse:
        request = run.request
        choices: list[CompletionResponseChoice] = []
        for prompt, result in zip(run.prompts, await self._run_all(run), strict=True):
            run.usage.add_cached(result.num_cached_tokens)
            for output in _kept_outputs(run, result):
                text, logprobs, _ = self._render(
                    run, prompt, result.prompt_logprobs, output, has_prompt=request.echo
                )
                wanted = None if request.prompt_logprobs is None else result.prompt_logprobs
                choices.append(
                    CompletionResponseChoice(
                        index=len(choices),
                        text=text,
                        logprobs=logprobs,
                        finish_reason=output.finish_reason,
                        stop_reason=output.stop_reason,
                        prompt_logprobs=render_prompt_logprobs(wanted),
                    )
                )
                run.usage.completion_tokens += _num_new_tokens(run, prompt, output)
        return CompletionResponse(
            id=run.response_id,
            created=run.created,
            model=self._serving.model_name,
            choices=choices,
            usage=run.usage.total(),
        )

    async def _run_all(self, run: _Run) -> list[RequestOutput]:
        """Run every prompt to its end; results in the order of the prompts."""
        results: dict[int, RequestOutput] = {}
        async with contextlib.aclosing(merge_streams(self._start(run, is_delta=False))) as merged:
            async for index, result in merged:
                results[index] = result
        return [results[i] for i in range(len(run.prompts))]

    def _start(self, run: _Run, *, is_delta: bool) -> list[AsyncGenerator[RequestOutput, None]]:
        """Start one engine request for each prompt."""
        request = run.request
        params = (
            request.to_beam_search_params()
            if request.use_beam_search
            else request.to_sampling_params(is_delta=is_delta)
        )
        return [
            self._serving.generate(
                prompt,
                params,
                f"{run.response_id}-{i}",
                priority=request.priority,
                schema_field=request.schema_field(),
            )
            for i, prompt in enumerate(run.prompts)
        ]

    async def _stream(self, run: _Run) -> EventGenerator:
        request = run.request
        offsets: dict[int, int] = {}  # choice -> characters sent
        scores: dict[int, PromptLogprobs | None] = {}  # prompt -> log-probabilities of its tokens
        async with contextlib.aclosing(merge_streams(self._start(run, is_delta=True))) as merged:
            async for number, result in merged:
                prompt = run.prompts[number]
                if number not in scores:
                    scores[number] = result.prompt_logprobs
                    run.usage.add_cached(result.num_cached_tokens)
                for output in result.outputs:
                    index = output.index + number * request.n
                    text, logprobs, offsets[index] = self._render(
                        run,
                        prompt,
                        scores[number],
                        output,
                        has_prompt=request.echo and index not in offsets,
                        offset=offsets.get(index, 0),
                    )
                    run.usage.completion_tokens += len(output.token_ids)
                    choice = CompletionResponseChoice(
                        index=index,
                        text=text,
                        logprobs=logprobs,
                        finish_reason=output.finish_reason,
                        stop_reason=output.stop_reason,
                    )
                    yield self._event(run, [choice], has_usage=request.continuous_usage)
        if request.include_usage:
            yield self._event(run, [], has_usage=True)

    async def _replay(self, run: _Run, response: CompletionResponse) -> EventGenerator:
        """Send a finished response as a stream, one event a choice."""
        for choice in response.choices:
            choice.prompt_logprobs = msgspec.UNSET
            yield self._event(run, [choice], has_usage=run.request.continuous_usage)
        if run.request.include_usage:
            yield self._event(run, [], has_usage=True)

    def _event(
        self, run: _Run, choices: list[CompletionResponseChoice], *, has_usage: bool
    ) -> bytes:
        return encode_event(
            CompletionResponse(
                id=run.response_id,
                created=run.created,
                model=self._serving.model_name,
                choices=choices,
                usage=run.usage.total() if has_usage else None,
            )
        )

    def _render(
        self,
        run: _Run,
        prompt: Prompt,
        prompt_scores: PromptLogprobs | None,
        output: CompletionOutput,
        *,
        has_prompt: bool,
        offset: int = 0,
    ) -> tuple[str, CompletionLogProbs | None, int]:
        """Return text, log-probabilities and the offset behind them, the prompt in front or not."""
        text = self._serving.decode_prompt(prompt) + output.text if has_prompt else output.text
        num_top = run.request.logprobs
        if num_top is None:
            return text, None, offset
        ids: list[int] = list(output.token_ids)
        entries: PromptLogprobs = list(output.logprobs or ())
        if has_prompt:
            ids = prompt.token_ids + ids
            entries = list(prompt_scores or ()) + entries
        logprobs, offset = self._serving.logprobs.render_completion(
            ids,
            entries,
            num_top,
            offset=offset,
            num_unseen=prompt.num_added_tokens if has_prompt else 0,
        )
        return text, logprobs, offset


def _kept_outputs(run: _Run, result: RequestOutput) -> list[CompletionOutput]:
    if not run.is_scoring:
        return result.outputs
    return [_nothing_generated(i) for i in range(run.request.n)]


def _nothing_generated(index: int) -> CompletionOutput:
    return CompletionOutput(index=index, text="", token_ids=[], logprobs=[], finish_reason="length")


def _num_new_tokens(run: _Run, prompt: Prompt, output: CompletionOutput) -> int:
    """Count generated tokens; the ids of a beam begin with the prompt."""
    skipped = len(prompt.token_ids) if run.request.use_beam_search and output.token_ids else 0
    return len(output.token_ids) - skipped
