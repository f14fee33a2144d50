"""From chat messages to the text of a prompt.

Loads templates, checks and normalises OpenAI message objects, and renders them through the
tokenizer's own `apply_chat_template`. Called by the HTTP layer and by `LLM.chat`; it never
tokenises and never imports torch.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatMessage = dict[str, Any]

_OWN_VARIABLES = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents",
    "messages", "tokenize", "tools",
}  # fmt: skip
"""Variables of a template, or settings of its rendering, that are set here."""

_TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # part type -> the key that holds its text
_MEDIA_PARTS = {"image_url", "input_image", "audio_url", "input_audio", "video_url", "file"}


def load_chat_template(given: str | os.PathLike[str] | None) -> str | None:
    """Return the text of a template given as a file's path or as the template itself.

    A template written on one line may hold escapes such as `\\n`; they are decoded.

    Raises:
        ConfigError: the value is neither a readable file nor looks like Jinja, the file is no text,
            or an escape is none.
    """
    if given is None:
        return None
    text = os.fspath(given)
    try:
        with open(text, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as cause:
        raise ConfigError(
            f"chat template {text!r}: the file is not UTF-8 text ({cause})"
        ) from cause
    except OSError as cause:
        if not any(mark in text for mark in "{}\n"):
            raise ConfigError(
                f"chat template {text!r}: no such file ({cause.strerror}), and it does not look "
                "like a Jinja template (no '{', '}' or line break)"
            ) from cause
    try:
        # Latin-1 bytes stand for themselves in unicode_escape, what lies beyond becomes an escape.
        return codecs.decode(text.encode("latin-1", "backslashreplace"), "unicode_escape")
    except UnicodeDecodeError as cause:
        raise ConfigError(f"chat template: a backslash begins no escape ({cause})") from cause


def parse_chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Check message objects and turn them into what templates expect.

    Content becomes one string (null is empty, text parts are joined by line breaks); the
    arguments of earlier tool calls become objects; null fields are dropped; all other fields are
    kept.

    Raises:
        RequestError: a message is malformed or has content that a text model cannot take.
    """
    if not messages:
        raise RequestError("messages: at least one message is needed", "messages")
    return [_parse_message(index, message) for index, message in enumerate(messages)]


def render_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, str]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Render messages, as `parse_chat_messages` returns them, into the text of a prompt.

    Without `chat_template` the tokenizer's own template is taken; `template_kwargs` are further
    variables of the template.

    Raises:
        RequestError: no template, a variable that is not free, or whatever the template raises,
            with its text.
    """
    if chat_template is None and not tokenizer.chat_template:
        raise RequestError(
            "the model's tokenizer has no chat template: start the server with --chat-template, or "
            "send `chat_template` with the request",
            "chat_template",
        )
    if taken := sorted(_OWN_VARIABLES & set(template_kwargs or ())):
        raise RequestError(
            f"chat_template_kwargs: {', '.join(taken)} cannot be set here; messages, tools and "
            "documents are fields of the request, as are the two switches of the prompt's end",
            "chat_template_kwargs",
        )
    try:
        rendered: str = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            documents=list(documents) if documents else None,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **(template_kwargs or {}),
        )
    except Exception as cause:  # a template is foreign code and may raise anything
        why = str(cause) or type(cause).__name__
        raise RequestError(f"chat template: {why}", "messages") from cause
    return rendered


def _parse_message(index: int, message: Mapping[str, Any]) -> ChatMessage:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: an object is expected, got {type(message).__name__}", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role: a role such as 'user' is needed", f"{where}.role")
    parsed = {key: value for key, value in message.items() if value is not None}
    parsed["content"] = _parse_content(f"{where}.content", message.get("content"))
    if "tool_calls" in parsed:
        parsed["tool_calls"] = _parse_tool_calls(f"{where}.tool_calls", parsed["tool_calls"])
        if not parsed["tool_calls"]:
            del parsed["tool_calls"]
    return parsed


def _parse_content(where: str, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{where}: a string or a list of parts is expected", where)
    return "\n".join(_part_text(f"{where}[{i}]", part) for i, part in enumerate(content))


def _part_text(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestError(f"{where}: an object with a `type` is expected", where)
    kind = part.get("type")
    if kind in _MEDIA_PARTS:
        raise RequestError(f"{where}: {kind!r} is not supported, this model reads text only", where)
    if kind not in _TEXT_PARTS:
        raise RequestError(f"{where}: unknown part type {kind!r}; known: text, refusal", where)
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{where}.{_TEXT_PARTS[kind]}: a string is expected", where)
    return text


def _parse_tool_calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{where}: a list is expected", where)
    return [_parse_tool_call(f"{where}[{i}]", call) for i, call in enumerate(calls)]


def _parse_tool_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or "name" not in function:
        raise RequestError(f"{where}: an object with `function.name` is expected", where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as cause:
            raise RequestError(
                f"{where}.function.arguments: not valid JSON: {cause}", where
            ) from cause
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}
