"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from vllm.entrypoints.openai.request_base import RequestBody


class TokenizeRequest(RequestBody):
    """A text (`prompt`) or a conversation (`messages`) to tokenise.

    `add_special_tokens` is true for a text and false for a conversation, unless given.
    """

    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_one_kind(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: exactly one of `prompt` and `messages` is needed")
        if self.continue_final_message and "add_generation_prompt" not in self.model_fields_set:
            self.add_generation_prompt = False
        return self


class DetokenizeRequest(RequestBody):
    """Token ids to turn into text."""

    model: str
    tokens: list[int]
