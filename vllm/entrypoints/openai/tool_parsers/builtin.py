"""The parsers that come with the server: one format each.

hermes (Hermes, Qwen 2.5), llama3_json (Llama 3.1 and later), mistral and internlm. All read through
`CallStream`.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from vllm.entrypoints.openai.chat_request import ChatCompletionRequest
from vllm.entrypoints.openai.response import (
    DeltaFunctionCall,
    DeltaMessage,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.entrypoints.openai.tool_parsers.abstract import ToolParser, ToolParserManager
from vllm.entrypoints.openai.tool_parsers.call_stream import CallFormat, CallStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FormatToolParser(ToolParser):
    """A parser that is fully described by its format."""

    call_format: ClassVar[CallFormat]

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self._stream = CallStream(self.call_format)

    @property
    def is_incomplete(self) -> bool:
        """Whether what was streamed so far ends inside a call."""
        return self._stream.is_incomplete

    def adjust_request(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        """Keep special tokens in the text where the opener is one of them."""
        specials = self.model_tokenizer.all_special_tokens
        if any(token in self.call_format.opener for token in specials):
            return request.model_copy(update={"skip_special_tokens": False})
        return request

    def extract_tool_calls(
        self, model_output: str, request: ChatCompletionRequest
    ) -> ExtractedToolCallInformation:
        """Read a whole answer; one that ends inside a call is plain text."""
        return extract_calls(self.call_format, model_output)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: ChatCompletionRequest,
    ) -> DeltaMessage | None:
        """Read on."""
        return self._stream.feed(delta_text)

    def finish_streaming(self) -> DeltaMessage | None:
        """Return text that was held back."""
        return self._stream.finish()


def extract_calls(call_format: CallFormat, text: str) -> ExtractedToolCallInformation:
    """Read a whole answer in a given format."""
    stream = CallStream(call_format)
    deltas = [stream.feed(text), stream.finish()]
    if stream.is_incomplete or not stream.num_calls:
        return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=text)
    calls: list[ToolCall] = []
    content = ""
    for delta in deltas:
        content += (delta and delta.content) or ""
        for call in (delta and delta.tool_calls) or ():
            function = call.function
            assert isinstance(function, DeltaFunctionCall), "CallStream makes no other kind"
            if call.id is not None:
                made = FunctionCall(name=function.name or "", arguments="")
                calls.append(ToolCall(id=call.id, function=made))
            calls[call.index].function.arguments += function.arguments or ""
    return ExtractedToolCallInformation(
        tools_called=True, tool_calls=calls, content=content if content.strip() else None
    )


@ToolParserManager.register_module("hermes")
class HermesToolParser(FormatToolParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them, text before."""

    call_format = CallFormat(opener="<tool_call>", is_opener_repeated=True)


@ToolParserManager.register_module("llama3_json")
class Llama3JsonToolParser(FormatToolParser):
    """`{"name": …, "parameters": {…}}; {…}`, from the first character, `<|python_tag|>` or not."""

    call_format = CallFormat(
        opener="<|python_tag|>", between="; \n\r\t", is_bare_allowed=True, needs_arguments=True
    )


def _make_short_id() -> str:
    """Return nine letters and digits: Mistral's templates accept no other id in later turns."""
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))


@ToolParserManager.register_module("mistral")
class MistralToolParser(FormatToolParser):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, text before."""

    call_format = CallFormat(opener="[TOOL_CALLS]", between="[],; \n\r\t", make_id=_make_short_id)


@ToolParserManager.register_module("internlm")
class InternlmToolParser(FormatToolParser):
    """`<|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>`, text before."""

    call_format = CallFormat(opener="<|action_start|><|plugin|>", is_opener_repeated=True)


FORCED_CALLS = CallFormat(opener="", between="[], \n\r\t", is_bare_allowed=True)
"""What tool_choice "required" makes the model write: an array of calls."""
