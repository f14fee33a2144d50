"""The body of POST /v1/completions and how it becomes sampling parameters."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from vllm.entrypoints.openai.request_base import SamplingFields
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(SamplingFields):
    """A text completion; `prompt` is one text, one list of ids, or a list of either."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0)
    max_tokens: int = Field(default=DEFAULT_MAX_TOKENS, ge=0)
    suffix: str | None = None
    temperature: float = 1.0
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if self.suffix is not None:
            raise ValueError("suffix: not supported, no text can be inserted before a suffix")
        if isinstance(self.prompt, list) and (not self.prompt or [] in self.prompt):
            raise ValueError("prompt: must not be empty")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether generated tokens are reported with their probabilities."""
        return self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or a list of ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def to_sampling_params(self, *, is_delta: bool) -> SamplingParams:
        """Return the engine's parameters.

        An echo with logprobs needs those of the prompt too. Scoring a prompt (max_tokens 0)
        samples one token, which the response leaves out.
        """
        prompt_logprobs = self.prompt_logprobs
        if self.echo and prompt_logprobs is None:
            prompt_logprobs = self.logprobs
        return self.sampling_params(
            temperature=self.temperature,
            max_tokens=max(self.max_tokens, 1),
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
            output_kind=RequestOutputKind.DELTA if is_delta else RequestOutputKind.FINAL_ONLY,
        )

    def to_beam_search_params(self) -> BeamSearchParams:
        """Return the parameters of a beam search."""
        return self.beam_search_params(
            temperature=self.temperature, max_tokens=max(self.max_tokens, 1)
        )
