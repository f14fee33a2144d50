"""The body of POST /v1/chat/completions and how it becomes sampling parameters."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from vllm.entrypoints.openai.request_base import OpenAIBaseModel, SamplingFields
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams


class FunctionDefinition(OpenAIBaseModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatCompletionToolsParam(OpenAIBaseModel):
    """One entry of `tools`."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class ChatCompletionNamedFunction(OpenAIBaseModel):
    """The function that a named tool choice asks for."""

    name: str


class ChatCompletionNamedToolChoiceParam(OpenAIBaseModel):
    """A tool choice that names a function."""

    type: Literal["function"] = "function"
    function: ChatCompletionNamedFunction


ToolChoice = Literal["none", "auto", "required"] | ChatCompletionNamedToolChoiceParam


class ChatCompletionRequest(SamplingFields):
    """A chat completion."""

    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float = 0.7
    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    # beyond OpenAI
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, str]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if not self.messages:
            raise ValueError("messages: at least one message is needed")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs = true")
        if self.continue_final_message:
            if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
                raise ValueError(
                    "continue_final_message: cannot be true together with add_generation_prompt: "
                    "the answer either continues the last message or begins a new one"
                )
            self.add_generation_prompt = False
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        choice = self.tool_choice
        names = [tool.function.name for tool in self.tools or ()]
        if choice in (None, "none"):
            return
        if not names:
            raise ValueError("tool_choice: needs `tools`, unless it is 'none'")
        wanted = choice.function.name if not isinstance(choice, str) and choice else None
        if wanted is not None and wanted not in names:
            raise ValueError(f"tool_choice: {wanted!r} is not in tools ({', '.join(names)})")

    @property
    def effective_tool_choice(self) -> ToolChoice:
        """The tool choice, with its default filled in: auto if there are tools, none otherwise."""
        if self.tool_choice is not None:
            return self.tool_choice
        return "auto" if self.tools else "none"

    @property
    def wants_logprobs(self) -> bool:
        """Whether generated tokens are reported with their probabilities."""
        return self.logprobs

    @property
    def wanted_max_tokens(self) -> int | None:
        """The limit asked for under its new or its old name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def to_sampling_params(
        self,
        *,
        max_tokens: int,
        is_delta: bool,
        tool_schema: dict[str, Any] | None,
    ) -> SamplingParams:
        """Return the engine's parameters.

        Args:
            max_tokens: the limit, with its default filled in.
            is_delta: whether outputs hold only what is new.
            tool_schema: what a forced tool call demands.
        """
        prompt_logprobs = self.prompt_logprobs
        if self.echo and prompt_logprobs is None:
            prompt_logprobs = self.top_logprobs if self.logprobs and not self.stream else None
        return self.sampling_params(
            temperature=self.temperature,
            max_tokens=max_tokens,
            logprobs=self.top_logprobs if self.logprobs else None,
            prompt_logprobs=prompt_logprobs,
            output_kind=RequestOutputKind.DELTA if is_delta else RequestOutputKind.FINAL_ONLY,
            tool_schema=tool_schema,
        )

    def to_beam_search_params(self, *, max_tokens: int) -> BeamSearchParams:
        """Return the parameters of a beam search."""
        return self.beam_search_params(temperature=self.temperature, max_tokens=max_tokens)
