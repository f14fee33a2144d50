"""One answer of a chat completion: text, or tool calls, whole or as it streams.

`serving_chat.py` makes one object for each choice of a request. What the tool choice means for the
answer is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.entrypoints.openai.chat_request import ChatCompletionRequest
from vllm.entrypoints.openai.response import (
    ChatMessage,
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
    ToolCall,
    make_tool_call_id,
)
from vllm.entrypoints.openai.tool_choice import ToolMode, ToolPlan
from vllm.entrypoints.openai.tool_parsers.abstract import ToolParser
from vllm.entrypoints.openai.tool_parsers.builtin import FORCED_CALLS, extract_calls
from vllm.entrypoints.openai.tool_parsers.call_stream import CallStream
from vllm.logger import init_logger

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How the answers of a request are read.

    Attributes:
        role: role of the answer.
        prefix: text put before the answer (echo, continued message).
    """

    request: ChatCompletionRequest
    tools: ToolPlan
    role: str
    prefix: str = ""


def make_message(
    form: AnswerForm, text: str, parser: ToolParser | None
) -> tuple[ChatMessage, bool]:
    """Return a whole answer as a message, and whether it ended in tool calls.

    Args:
        form: how to read it.
        text: what the model wrote.
        parser: a fresh parser in mode AUTO, else None.
    """
    mode = form.tools.mode
    if mode is ToolMode.NAMED:
        call = ToolCall(function=FunctionCall(name=form.tools.function, arguments=text))
        return ChatMessage(role=form.role, content="", tool_calls=[call]), False
    if mode is ToolMode.REQUIRED:
        found = extract_calls(FORCED_CALLS, text)
    elif parser is not None:
        try:
            found = parser.extract_tool_calls(text, form.request)
        except Exception:  # a plugin is foreign code; its failure must not lose the answer
            logger.exception("the tool parser failed; the answer is returned as text")
            return ChatMessage(role=form.role, content=form.prefix + text), False
    else:
        return ChatMessage(role=form.role, content=form.prefix + text), False
    if not found.tools_called:
        return ChatMessage(role=form.role, content=form.prefix + text), False
    calls = found.tool_calls if form.request.parallel_tool_calls else found.tool_calls[:1]
    return ChatMessage(role=form.role, content=found.content, tool_calls=calls), True


class AnswerStream:
    """One answer as it streams.

    Attributes:
        has_calls: whether a tool call of the model's own choice was sent.
        is_cut: whether what was read so far ends inside a call.
    """

    def __init__(self, form: AnswerForm, parser: ToolParser | None) -> None:
        """Begin an answer; `parser` is a fresh one in mode AUTO, else None."""
        self.has_calls = False
        self.is_cut = False
        self._form = form
        self._parser = parser
        self._forced = CallStream(FORCED_CALLS) if form.tools.mode is ToolMode.REQUIRED else None
        self._named_begun = False
        self._text = ""  # kept only for parsers, whose interface wants all of it
        self._token_ids: list[int] = []

    def read(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> DeltaMessage | None:
        """Return what is new, or None where nothing can be said yet."""
        if self._form.tools.mode is ToolMode.NAMED:
            return self._named(text)
        if self._forced is not None:
            delta = self._forced.feed(text)
            self.is_cut = self._forced.is_incomplete
            return self._filter(_join(delta, self._forced.finish() if is_last else None))
        if self._parser is not None:
            parser = self._parser
            delta = self._parse(parser, text, token_ids)
            self.is_cut = parser.is_incomplete
            return self._filter(_join(delta, parser.finish_streaming() if is_last else None))
        return DeltaMessage(content=text)

    def _named(self, text: str) -> DeltaMessage:
        if self._named_begun:
            call = DeltaToolCall(index=0, function=DeltaFunctionCall(arguments=text))
        else:
            self._named_begun = True
            call = DeltaToolCall(
                index=0,
                id=make_tool_call_id(),
                type="function",
                function=DeltaFunctionCall(name=self._form.tools.function, arguments=text),
            )
        return DeltaMessage(tool_calls=[call])

    def _parse(
        self, parser: ToolParser, text: str, token_ids: Sequence[int]
    ) -> DeltaMessage | None:
        before_text, before_ids = self._text, list(self._token_ids)
        self._text += text
        self._token_ids.extend(token_ids)
        try:
            return parser.extract_tool_calls_streaming(
                before_text,
                self._text,
                text,
                before_ids,
                self._token_ids,
                token_ids,
                self._form.request,
            )
        except Exception:  # a plugin is foreign code; its failure must not lose the answer
            logger.exception("the tool parser failed; the answer goes on as text")
            self._parser = None
            return DeltaMessage(content=text)

    def _filter(self, delta: DeltaMessage | None) -> DeltaMessage | None:
        if delta is None or not delta.tool_calls:
            return delta
        self.has_calls = True
        if not self._form.request.parallel_tool_calls:
            delta.tool_calls = [call for call in delta.tool_calls if call.index == 0] or None
        return delta


def _join(first: DeltaMessage | None, second: DeltaMessage | None) -> DeltaMessage | None:
    if first is None or second is None:
        return second if first is None else first
    content = (first.content or "") + (second.content or "")
    calls = [*(first.tool_calls or ()), *(second.tool_calls or ())]
    return DeltaMessage(content=content or None, tool_calls=calls or None)
