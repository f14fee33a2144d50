"""The forms in which a prompt can be given."""

from __future__ import annotations

from typing import Any, NotRequired, TypeAlias, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text, tokenised with the tokenizer's special tokens."""

    prompt: str
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids, used as they are."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


SingletonPrompt: TypeAlias = str | TextPrompt | TokensPrompt


class ExplicitEncoderDecoderPrompt(TypedDict):
    """A prompt of an encoder-decoder model; such models are not served."""

    encoder_prompt: SingletonPrompt
    decoder_prompt: SingletonPrompt | None
    mm_processor_kwargs: NotRequired[dict[str, Any]]


PromptType: TypeAlias = SingletonPrompt | ExplicitEncoderDecoderPrompt


def token_inputs(prompt_token_ids: list[int], prompt: str | None = None) -> TokensPrompt:
    """Return a TokensPrompt that also carries the text it came from."""
    if prompt is None:
        return TokensPrompt(prompt_token_ids=prompt_token_ids)
    return TokensPrompt(prompt_token_ids=prompt_token_ids, prompt=prompt)
