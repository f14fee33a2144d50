"""What the endpoints share: the engine, the model's facts, and the way from a body to a prompt.

Holds no state of a request. The serving classes for completions, chat and tokens are built on one
`ServingEngine`; `launcher.py` makes it once the engine runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.config import ModelConfig
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.logger import RequestLogger
from vllm.entrypoints.openai.chat_template import ChatMessage, render_chat_template
from vllm.entrypoints.openai.errors import ApiError, model_not_found, raise_if_dead
from vllm.entrypoints.openai.logprobs import LogprobRenderer
from vllm.entrypoints.openai.response import PromptTokensDetails, UsageInfo
from vllm.entrypoints.openai.template_process import TemplateJob, TemplateProcess
from vllm.errors import RequestError
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONG_TEXT = 20_000
"""Characters from which a text is tokenised off the event loop, so that streams go on meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt, ready for the engine.

    Attributes:
        text: what it says, for the log and for echo; None where it was given as ids.
        num_added_tokens: leading ids that the tokenizer added and the text does not hold (BOS).
    """

    token_ids: list[int]
    text: str | None = None
    num_added_tokens: int = 0
    cache_salt: str | None = None

    def with_salt(self, cache_salt: str) -> Prompt:
        """Return this prompt with a salt: cached blocks are shared among equal salts only."""
        return replace(self, cache_salt=cache_salt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEngine:
    """The engine behind the endpoints.

    Attributes:
        tokenizer: None with --skip-tokenizer-init; then prompts are ids and there is no text.
        request_logger: None with --disable-log-requests.
    """

    engine: EngineClient
    model_config: ModelConfig
    tokenizer: PreTrainedTokenizerBase | None
    logprobs: LogprobRenderer
    request_logger: RequestLogger | None
    templates: TemplateProcess = field(default_factory=TemplateProcess)

    @property
    def model_name(self) -> str:
        """The name that responses carry."""
        return self.model_config.served_model_names[0]

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.model_config.max_model_len

    def check_request(self, model: str) -> None:
        """Raise if the model is not served here or the engine has ended."""
        served = self.model_config.served_model_names
        if model not in served:
            raise model_not_found(model, served)
        raise_if_dead(self.engine)

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer.

        Raises:
            ApiError: the server runs without one.
        """
        if self.tokenizer is None:
            raise ApiError(
                "the server was started with --skip-tokenizer-init: send the prompt as token ids"
            )
        return self.tokenizer

    async def encode_text(
        self, text: str, *, add_special_tokens: bool, truncate: int | None = None
    ) -> Prompt:
        """Tokenise a text, keeping its last `truncate` tokens."""
        tokenizer = self.require_tokenizer()
        if len(text) < _LONG_TEXT:
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            ids = await asyncio.to_thread(
                tokenizer.encode, text, add_special_tokens=add_special_tokens
            )
        if truncate is not None and truncate < len(ids):
            ids = ids[-truncate:]
            return Prompt(token_ids=ids, text=tokenizer.decode(ids))
        bos = tokenizer.bos_token_id
        is_added = add_special_tokens and bool(ids) and ids[0] == bos
        return Prompt(token_ids=ids, text=text, num_added_tokens=int(is_added))

    async def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        own_template: str | None,
        server_template: str | None,
        tools: list[dict[str, Any]] | None,
        documents: list[dict[str, str]] | None = None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: dict[str, Any] | None,
    ) -> str:
        """Return the text of a conversation; arguments are those of `render_chat_template`.

        `own_template` came with the request: it is foreign code and runs in another process.
        `server_template` replaces the tokenizer's.
        """
        tokenizer = self.require_tokenizer()
        if not own_template:
            return render_chat_template(
                tokenizer,
                messages,
                chat_template=server_template,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
            )
        return await self.templates.render(
            TemplateJob(
                special_tokens=tokenizer.special_tokens_map,
                messages=messages,
                chat_template=tokenizer.get_chat_template(own_template, tools),  # may be a name
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
            )
        )

    def take_token_ids(self, ids: Sequence[int], *, truncate: int | None = None) -> Prompt:
        """Return a prompt given as ids, keeping the last `truncate` of them."""
        return Prompt(token_ids=list(ids if truncate is None else ids[-truncate:]))

    def decode_prompt(self, prompt: Prompt) -> str:
        """Return the prompt's text, special tokens included."""
        if prompt.text is not None:
            return prompt.text
        return "" if self.tokenizer is None else str(self.tokenizer.decode(prompt.token_ids))

    def limit_tokens(self, prompt: Prompt, max_tokens: int | None, *, param: str) -> int:
        """Return the most tokens that may be generated; None takes all that the model has room for.

        Raises:
            ApiError: prompt and answer together do not fit the model.
        """
        length, limit = len(prompt.token_ids), self.max_model_len
        room = limit - length
        if max_tokens is None and room > 0:
            return room
        if max_tokens is not None and max_tokens <= room:
            return max_tokens
        asked = "" if max_tokens is None else f" and {max_tokens} for the completion"
        raise ApiError(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{length + (max_tokens or 0)} tokens ({length} in the prompt{asked}). Please reduce "
            "the length of the prompt or of the completion.",
            code="context_length_exceeded",
            param=param,
        )

    def limit_alternatives(self, wanted: int, *, param: str) -> None:
        """Raise ApiError if more candidates of a token are asked for than the engine reports."""
        limit = self.model_config.max_logprobs
        if wanted > limit:
            raise ApiError(
                f"{param} may be at most {limit} (max_logprobs), got {wanted}", param=param
            )

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        schema_field: str = "guided_json",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Log one request and start it; closing the iterator aborts it.

        `schema_field` is the field of the body that a JSON schema for the answer came in.
        """
        if self.request_logger is not None:
            self.request_logger.log_inputs(request_id, prompt.text, prompt.token_ids, params)
        inputs = TokensPrompt(prompt_token_ids=prompt.token_ids)
        if prompt.text is not None:
            inputs["prompt"] = prompt.text
        if prompt.cache_salt is not None:
            inputs["cache_salt"] = prompt.cache_salt
        if isinstance(params, BeamSearchParams):
            return self.engine.beam_search(inputs, request_id, params)
        results = self.engine.generate(inputs, params, request_id, priority=priority)
        if schema_field == "guided_json":
            return results
        return _rename_schema(results, schema_field)


async def _rename_schema(
    results: AsyncGenerator[RequestOutput, None], field: str
) -> AsyncGenerator[RequestOutput, None]:
    """Pass results on; an error in the schema names the field that the client wrote it in."""
    async with contextlib.aclosing(results):
        try:
            async for result in results:
                yield result
        except RequestError as cause:
            if cause.param != "guided_json":
                raise
            raise RequestError(str(cause).replace("guided_json", field, 1), field) from cause


class UsageCounter:
    """Counts the tokens of a request: each prompt once, the completions of all choices."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens: int | None = None

    def add_prompt(self, num_tokens: int) -> None:
        """Count a prompt."""
        self.prompt_tokens += num_tokens

    def add_cached(self, num_tokens: int | None) -> None:
        """Count prompt tokens that were found in the prefix cache; None where it is not known."""
        if num_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + num_tokens

    def total(self) -> UsageInfo:
        """Return the counts so far."""
        usage = UsageInfo(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
        )
        if self.cached_tokens is not None:
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=self.cached_tokens)
        return usage
