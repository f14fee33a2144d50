"""POST /v1/chat/completions: from the body to a response or a stream of events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from vllm.entrypoints.openai.chat_answer import AnswerForm, AnswerStream, make_message
from vllm.entrypoints.openai.chat_request import ChatCompletionRequest
from vllm.entrypoints.openai.chat_template import ChatMessage, parse_chat_messages
from vllm.entrypoints.openai.event_stream import EventGenerator, EventStream, open_stream
from vllm.entrypoints.openai.logprobs import render_prompt_logprobs
from vllm.entrypoints.openai.response import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionStreamResponse,
    ChatLogprobs,
    ChatStreamChoice,
    DeltaMessage,
    encode_event,
    unix_time,
)
from vllm.entrypoints.openai.serving_engine import Prompt, ServingEngine, UsageCounter
from vllm.entrypoints.openai.tool_choice import ToolMode, plan_tools
from vllm.entrypoints.openai.tool_parsers.abstract import ToolParser
from vllm.outputs import CompletionOutput, RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """What the operator chose for chats.

    Attributes:
        chat_template: template text that replaces the tokenizer's, or None.
        tool_parser: class that reads tool calls, or None without --enable-auto-tool-choice.
    """

    response_role: str = "assistant"
    chat_template: str | None = None
    tool_parser: type[ToolParser] | None = None


@dataclass(slots=True)
class _Run:
    """One HTTP request while it runs."""

    request: ChatCompletionRequest
    response_id: str
    prompt: Prompt
    form: AnswerForm
    created: int = field(default_factory=unix_time)
    usage: UsageCounter = field(default_factory=UsageCounter)


class OpenAIServingChat:
    """The chat endpoint."""

    def __init__(self, serving: ServingEngine, settings: ChatSettings) -> None:
        self._serving = serving
        self._settings = settings

    async def create_chat_completion(
        self, request: ChatCompletionRequest, request_id: str
    ) -> ChatCompletionResponse | EventStream:
        """Answer one request.

        Raises: ApiError, RequestError, EngineDeadError; all before the first event of a stream.
        """
        self._serving.check_request(request.model)
        parser = self._settings.tool_parser
        tools = plan_tools(request, is_auto_enabled=parser is not None)
        if tools.mode is ToolMode.AUTO:
            request = self._new_parser().adjust_request(request)
        messages = parse_chat_messages(request.messages)
        form = AnswerForm(
            request=request,
            tools=tools,
            role=self._role(request, messages),
            prefix=self._prefix(request, messages),
        )
        prompt = await self._make_prompt(form, messages)
        run = _Run(request, f"chat-{request_id}", prompt, form)
        run.usage.add_prompt(len(prompt.token_ids))
        results = self._start(run)
        if not request.stream:
            return await self._respond(run, results)
        if request.use_beam_search:
            return await open_stream(self._replay(run, await self._respond(run, results)))
        return await open_stream(self._stream(run, results))

    def _new_parser(self) -> ToolParser:
        assert self._settings.tool_parser is not None, "mode AUTO is refused without a parser"
        return self._settings.tool_parser(self._serving.require_tokenizer())

    def _role(self, request: ChatCompletionRequest, messages: list[ChatMessage]) -> str:
        if request.add_generation_prompt:
            return self._settings.response_role
        return str(messages[-1]["role"])

    def _prefix(self, request: ChatCompletionRequest, messages: list[ChatMessage]) -> str:
        """Return the last message's text where the answer is to begin with it."""
        last = messages[-1]
        is_wanted = request.echo or request.continue_final_message
        if not is_wanted or last["role"] != self._role(request, messages):
            return ""
        return str(last["content"])

    async def _make_prompt(self, form: AnswerForm, messages: list[ChatMessage]) -> Prompt:
        request = form.request
        text = await self._serving.render_chat(
            messages,
            own_template=request.chat_template,
            server_template=self._settings.chat_template,
            tools=form.tools.tools,
            documents=request.documents,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=request.chat_template_kwargs,
        )
        prompt = await self._serving.encode_text(
            text,
            add_special_tokens=request.add_special_tokens,
            truncate=request.truncate_prompt_tokens,
        )
        return prompt if request.cache_salt is None else prompt.with_salt(request.cache_salt)

    def _start(self, run: _Run) -> AsyncGenerator[RequestOutput, None]:
        request = run.request
        wanted = request.wanted_max_tokens
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        self._serving.limit_alternatives(request.top_logprobs, param="top_logprobs")
        max_tokens = self._serving.limit_tokens(
            run.prompt, wanted, param="messages" if wanted is None else name
        )
        params = (
            request.to_beam_search_params(max_tokens=max_tokens)
            if request.use_beam_search
            else request.to_sampling_params(
                max_tokens=max_tokens,
                is_delta=request.stream,
                tool_schema=run.form.tools.schema,
            )
        )
        return self._serving.generate(
            run.prompt,
            params,
            run.response_id,
            priority=request.priority,
            schema_field=request.schema_field(run.form.tools.schema),
        )

    async def _respond(
        self, run: _Run, results: AsyncGenerator[RequestOutput, None]
    ) -> ChatCompletionResponse:
        final: RequestOutput | None = None
        async with contextlib.aclosing(results):
            async for result in results:
                final = result
        assert final is not None, "the engine yields the final output or raises"
        run.usage.add_cached(final.num_cached_tokens)
        choices = [self._choice(run, i, output) for i, output in enumerate(final.outputs)]
        return ChatCompletionResponse(
            id=run.response_id,
            created=run.created,
            model=self._serving.model_name,
            choices=choices,
            usage=run.usage.total(),
            prompt_logprobs=render_prompt_logprobs(final.prompt_logprobs),
        )

    def _choice(
        self, run: _Run, index: int, output: CompletionOutput
    ) -> ChatCompletionResponseChoice:
        parser = self._new_parser() if run.form.tools.mode is ToolMode.AUTO else None
        message, is_called = make_message(run.form, output.text, parser)
        skipped = len(run.prompt.token_ids) if run.request.use_beam_search else 0
        run.usage.completion_tokens += len(output.token_ids) - skipped
        return ChatCompletionResponseChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(run, output),
            finish_reason="tool_calls" if is_called else output.finish_reason or "stop",
            stop_reason=output.stop_reason,
        )

    async def _stream(
        self, run: _Run, results: AsyncGenerator[RequestOutput, None]
    ) -> EventGenerator:
        request = run.request
        answers: list[AnswerStream] = []
        async with contextlib.aclosing(results):
            async for result in results:
                if not answers:
                    run.usage.add_cached(result.num_cached_tokens)
                    answers = [self._answer(run) for _ in range(request.n)]
                    for event in self._opening(run):
                        yield event
                for output in result.outputs:
                    event = self._advance(run, answers[output.index], output)
                    if event:
                        yield event
        if request.include_usage:
            yield self._event(run, None, has_usage=True)

    def _answer(self, run: _Run) -> AnswerStream:
        parser = self._new_parser() if run.form.tools.mode is ToolMode.AUTO else None
        return AnswerStream(run.form, parser)

    def _opening(self, run: _Run) -> list[bytes]:
        """Return the chunks that every choice begins with."""
        deltas = [DeltaMessage(role=run.form.role, content="")]
        if run.form.prefix:
            deltas.append(DeltaMessage(content=run.form.prefix))
        return [
            self._event(run, ChatStreamChoice(index=index, delta=delta))
            for delta in deltas
            for index in range(run.request.n)
        ]

    def _advance(self, run: _Run, answer: AnswerStream, output: CompletionOutput) -> bytes:
        """Return the chunk for what is new of one answer, or nothing where a parser waits."""
        run.usage.completion_tokens += len(output.token_ids)
        is_last = output.finish_reason is not None
        delta = answer.read(output.text, output.token_ids, is_last=is_last)
        logprobs = self._logprobs(run, output)
        if delta is None and logprobs is None and not is_last:
            return b""
        choice = ChatStreamChoice(
            index=output.index, delta=delta or DeltaMessage(), logprobs=logprobs
        )
        if is_last:
            # Clients run the calls of an answer that ends in them: half a call is none to run.
            is_called = answer.has_calls and not answer.is_cut
            choice.finish_reason = "tool_calls" if is_called else output.finish_reason
            choice.stop_reason = output.stop_reason
        return self._event(run, choice)

    async def _replay(self, run: _Run, response: ChatCompletionResponse) -> EventGenerator:
        """Send a finished response as a stream."""
        for event in self._opening(run):
            yield event
        for choice in response.choices:
            text = (choice.message.content or "").removeprefix(run.form.prefix)
            chunk = ChatStreamChoice(
                index=choice.index,
                delta=DeltaMessage(content=text),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            yield self._event(run, chunk)
        if run.request.include_usage:
            yield self._event(run, None, has_usage=True)

    def _event(
        self, run: _Run, choice: ChatStreamChoice | None, *, has_usage: bool = False
    ) -> bytes:
        chunk = ChatCompletionStreamResponse(
            id=run.response_id,
            created=run.created,
            model=self._serving.model_name,
            choices=[] if choice is None else [choice],
        )
        if has_usage or run.request.continuous_usage:
            chunk.usage = run.usage.total()
        return encode_event(chunk)

    def _logprobs(self, run: _Run, output: CompletionOutput) -> ChatLogprobs | None:
        request = run.request
        if not request.logprobs or output.logprobs is None:
            return None
        return self._serving.logprobs.render_chat(
            output.token_ids,
            output.logprobs,
            request.top_logprobs,
            skip_special_tokens=request.skip_special_tokens,
        )
