"""Response bodies and stream chunks, as msgspec structs.

A stream encodes one of these for every token, so they are cheap to make and to encode. A field
whose value is UNSET is left out of the JSON; None is written as null. Built by the serving
classes only.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


def unix_time() -> int:
    """Return the time for `created`, in whole seconds."""
    return int(time.time())


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """How many prompt tokens were found in the prefix cache."""

    cached_tokens: int


class UsageInfo(msgspec.Struct, kw_only=True):
    """Token counts of a whole request: prompts once each, completions of all choices."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class CompletionLogProbs(msgspec.Struct, kw_only=True):
    """Log-probabilities of a text completion, four lists of one length."""

    text_offset: list[int] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    tokens: list[str] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)


class PromptLogprob(msgspec.Struct, kw_only=True):
    """One candidate at a prompt position."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionResponseChoice(msgspec.Struct, kw_only=True):
    """One answer of a text completion, or what is new of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The body of a text completion, and of each of its stream events."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseChoice]
    usage: UsageInfo | None = None


class TopLogprob(msgspec.Struct, kw_only=True):
    """A candidate beside the chosen token."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct, kw_only=True):
    """The chosen token and its candidates at one position."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of a chat answer, one entry for each token."""

    content: list[ChatLogprob]


class FunctionCall(msgspec.Struct, kw_only=True):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


def make_tool_call_id() -> str:
    """Return a fresh id for a tool call."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model asks for."""

    id: str = msgspec.field(default_factory=make_tool_call_id)
    type: str = "function"
    function: FunctionCall


class DeltaFunctionCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of a function call; what is None is left out."""

    name: str | None = None
    arguments: str | None = None

    def model_dump(self, exclude_none: bool = True) -> dict[str, str | None]:
        """Return the fields as a dict, as tool parser plugins written for 0.6.3 expect."""
        fields = {"name": self.name, "arguments": self.arguments}
        return {k: v for k, v in fields.items() if v is not None or not exclude_none}


class DeltaToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of a tool call; id, type and name come once, with its first piece."""

    index: int
    id: str | None = None
    type: str | None = None
    function: DeltaFunctionCall | dict[str, str | None] | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """The answer of a chat completion."""

    role: str
    content: str | None
    tool_calls: list[ToolCall] = msgspec.field(default_factory=list)


class ChatCompletionResponseChoice(msgspec.Struct, kw_only=True):
    """One answer of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None


class ChatCompletionResponse(msgspec.Struct, kw_only=True):
    """The body of a chat completion."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | None = None


class DeltaMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of a chat answer; what is None is left out."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None


class ChatStreamChoice(msgspec.Struct, kw_only=True):
    """What is new of one answer."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatCompletionStreamResponse(msgspec.Struct, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatStreamChoice]
    usage: UsageInfo | UnsetType = UNSET


class ExtractedToolCallInformation(msgspec.Struct, kw_only=True):
    """What a tool parser finds in a whole answer."""

    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class ModelPermission(msgspec.Struct, kw_only=True):
    """What old clients expect in a model card."""

    id: str = msgspec.field(default_factory=lambda: f"modelperm-{uuid.uuid4().hex}")
    object: str = "model_permission"
    created: int = msgspec.field(default_factory=unix_time)
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    """A name under which the model is served."""

    id: str
    object: str = "model"
    created: int = msgspec.field(default_factory=unix_time)
    owned_by: str = "vllm"
    root: str
    parent: str | None = None
    max_model_len: int | None = None
    permission: list[ModelPermission] = msgspec.field(default_factory=lambda: [ModelPermission()])


class ModelList(msgspec.Struct, kw_only=True):
    """The body of GET /v1/models."""

    object: str = "list"
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """The body of POST /detokenize."""

    prompt: str


class ErrorInfo(msgspec.Struct, kw_only=True):
    """An error in the words of OpenAI's service."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(msgspec.Struct, kw_only=True):
    """An error for both kinds of clients: OpenAI's `error` member, and the flat fields of 0.6.3."""

    error: ErrorInfo
    object: str = "error"
    message: str
    type: str
    param: str | None = None
    code: int


_ENCODER = msgspec.json.Encoder()


def encode_json(body: msgspec.Struct | dict[str, Any]) -> bytes:
    """Encode a response; strictly valid JSON (a stray NaN or infinity becomes null)."""
    return _ENCODER.encode(body)


def encode_event(body: msgspec.Struct) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + _ENCODER.encode(body) + b"\n\n"


STREAM_END = b"data: [DONE]\n\n"
