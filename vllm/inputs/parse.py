"""Tell prompts apart and refuse what is none.

Called by `engine/input_processor.py` for every request. Does not tokenise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.errors import RequestError
from vllm.utils.field_checks import to_builtin


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedPrompt:
    """A prompt in one form.

    Attributes:
        text: what is to be tokenised, or the text that the ids came from.
        token_ids: the ids, or None when the text is to be tokenised.
        cache_salt: prompts of different salts never share cached blocks.
    """

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Return `prompt` in one form.

    Raises:
        TypeError: it is neither text nor a dict with `prompt` or `prompt_token_ids`.
        RequestError: it asks for images, or is meant for an encoder-decoder model.
    """
    if isinstance(prompt, str):
        return ParsedPrompt(text=prompt, token_ids=None)
    if not isinstance(prompt, Mapping):
        raise TypeError(
            f"a prompt must be text or a dict with 'prompt' or 'prompt_token_ids', got "
            f"{type(prompt).__name__}; wrap token ids as {{'prompt_token_ids': [...]}}"
        )
    if "encoder_prompt" in prompt or "decoder_prompt" in prompt:
        raise RequestError("encoder-decoder models are not served; give a plain prompt")
    if prompt.get("multi_modal_data"):
        raise RequestError("only text prompts are served; leave multi_modal_data out")
    salt = prompt.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"cache_salt must be text, got {salt!r}", param="cache_salt")
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"'prompt' must be text, got {type(text).__name__}")
    if prompt.get("prompt_token_ids") is not None:
        return ParsedPrompt(
            text=text, token_ids=check_token_ids(prompt["prompt_token_ids"]), cache_salt=salt
        )
    if text is None:
        raise TypeError(
            f"a prompt dict needs 'prompt' or 'prompt_token_ids', got the keys {sorted(prompt)}"
        )
    return ParsedPrompt(text=text, token_ids=None, cache_salt=salt)


def check_token_ids(ids: Any) -> list[int]:
    """Return `ids` as a list of int.

    Raises: TypeError if it is something else.
    """
    if isinstance(ids, Sequence) and not isinstance(ids, (str, bytes)):
        result = list(ids)
    elif hasattr(ids, "tolist"):  # numpy array or tensor
        result = ids.tolist()
    else:
        raise TypeError(f"token ids must be a list of int, got {type(ids).__name__}")
    if not all(type(i) is int for i in result):  # numpy's are taken, True is not
        result = [i if isinstance(i, bool) else to_builtin(i) for i in result]
    if not all(type(i) is int for i in result):
        bad = next(i for i in result if type(i) is not int)
        raise TypeError(f"token ids must be int, got {bad!r}")
    return result
