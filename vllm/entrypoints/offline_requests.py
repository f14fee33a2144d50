"""From the argument forms of `LLM.generate` and `LLM.chat` to plain lists."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.openai.chat_template import parse_chat_messages, render_chat_template
from vllm.errors import RequestError
from vllm.inputs import PromptType, TokensPrompt, token_inputs
from vllm.sampling_params import GuidedDecodingParams, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GUIDED_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_decoding_backend": "backend",
    "guided_whitespace_pattern": "whitespace_pattern",
}
_GUIDED_FORMS = tuple(_GUIDED_FIELDS)[:5]


def collect_prompts(
    prompts: PromptType | Sequence[PromptType] | None,
    prompt_token_ids: list[int] | list[list[int]] | None,
) -> list[PromptType]:
    """Return the prompts of a call, given in the new or the old way.

    Raises:
        ValueError: none are given, or texts and ids differ in number.
        TypeError: something that is no prompt and holds none.
    """
    if prompt_token_ids is None:
        if prompts is None:
            raise RequestError("no prompts are given")
        return _as_list(prompts)
    rows = _as_rows(prompt_token_ids)
    if prompts is None:
        return [TokensPrompt(prompt_token_ids=row) for row in rows]
    texts = _as_list(prompts)
    if len(texts) != len(rows):
        raise RequestError(
            f"{len(texts)} prompts but {len(rows)} lists of prompt_token_ids were given; give one "
            "each"
        )
    return texts


def _as_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise TypeError(
            "prompts must be text, a dict with 'prompt' or 'prompt_token_ids', or a list of them, "
            f"got {prompts!r}"
        )
    return list(prompts)


def _as_rows(ids: Any) -> list[list[int]]:
    return [ids] if ids and isinstance(ids[0], int) else list(ids)


def match_params(given: Any, num_prompts: int) -> list[SamplingParams]:
    """Return a copy of the parameters for each prompt; the caller's objects stay as they are.

    Raises: ValueError if a list has another length, TypeError for what is neither params nor dict.
    """
    if given is None:
        given = SamplingParams()
    if isinstance(given, (SamplingParams, Mapping)):
        one = _as_params(given)
        return [one.clone() for _ in range(num_prompts)]
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(
            f"sampling_params must be SamplingParams, a dict, or a list of them, got "
            f"{type(given).__name__}"
        )
    if len(given) != num_prompts:
        raise RequestError(
            f"{num_prompts} prompts but {len(given)} sampling_params were given; give one for all, "
            "or one each"
        )
    return [_as_params(one).clone() for one in given]


def _as_params(given: Any) -> SamplingParams:
    if isinstance(given, SamplingParams):
        return given
    if isinstance(given, Mapping):
        return SamplingParams.from_dict(given)
    raise TypeError(f"sampling_params must be SamplingParams or a dict, got {type(given).__name__}")


def attach_guided_options(
    params: Sequence[SamplingParams], options: Mapping[str, Any] | object
) -> list[SamplingParams]:
    """Give every request the form that the old `guided_options_request` names.

    Raises: ValueError if several forms are named, or the params name one themselves.
    """
    warnings.warn(
        "guided_options_request is deprecated; use SamplingParams(guided_decoding=...)",
        DeprecationWarning,
        stacklevel=3,
    )
    fields = options if isinstance(options, Mapping) else vars(options)
    forms = [name for name in _GUIDED_FORMS if fields.get(name) is not None]
    unknown = [name for name in fields if name not in _GUIDED_FIELDS]
    if len(forms) != 1 or unknown:
        raise RequestError(
            f"guided_options_request must name one of {', '.join(_GUIDED_FORMS)}, got "
            f"{', '.join(fields) or 'nothing'}"
        )
    guided = GuidedDecodingParams.from_optional(
        **{_GUIDED_FIELDS[name]: value for name, value in fields.items()}
    )
    for one in params:
        if one.guided_decoding is not None:
            raise RequestError(
                "guided_decoding and guided_options_request are both given; give one"
            )
        one.guided_decoding = guided
    return list(params)


def render_chats(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
    *,
    chat_template: str | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: list[dict[str, Any]] | None,
) -> list[PromptType]:
    """Render one conversation or several, and tokenise them without adding special tokens.

    Raises: RequestError for malformed messages or a template that fails.
    """
    is_single = bool(messages) and isinstance(messages[0], Mapping)
    conversations: Any = [messages] if is_single else messages
    prompts: list[PromptType] = []
    for conversation in conversations:
        text = render_chat_template(
            tokenizer,
            parse_chat_messages(conversation),
            chat_template=chat_template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        prompts.append(token_inputs(tokenizer.encode(text, add_special_tokens=False), text))
    return prompts
