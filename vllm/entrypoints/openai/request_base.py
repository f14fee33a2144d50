"""What all request bodies share: how nulls and unknown fields are treated, and the sampling fields.

The completion and chat schemas build on these classes. Validation that needs the model or the
tokenizer happens later, in the serving classes; nothing here touches an engine.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from vllm.errors import RequestError
from vllm.logger import init_logger, warn_once
from vllm.sampling_params import (
    BeamSearchParams,
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingParams,
)

logger = init_logger(__name__)


class OpenAIBaseModel(BaseModel):
    """A body in which null means absent, and unknown fields are ignored with one warning each."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls_and_unknown(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = _field_names(cls)
        for name in data.keys() - known:
            warn_once(logger, f"{cls.__name__}: unknown field {str(name)[:64]!r} is ignored")
        return {name: data[name] for name in data.keys() & known if data[name] is not None}


def _field_names(model: type[BaseModel]) -> set[str]:
    names = set(model.model_fields)
    for field in model.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            names.update(str(choice) for choice in field.validation_alias.choices)
    return names


class RequestBody(OpenAIBaseModel):
    """A whole body; its texts must be texts.

    JSON can spell half of a surrogate pair, which no encoding of text can hold; it would fail
    somewhere deep inside.
    """

    @model_validator(mode="before")
    @classmethod
    def _check_texts(cls, data: Any) -> Any:
        try:
            json.dumps(data, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as cause:
            raise ValueError(
                "the body holds half of a surrogate pair (\\ud800 to \\udfff)"
            ) from cause
        return data


class StreamOptions(OpenAIBaseModel):
    """When usage is sent in a stream; both are off unless asked for, as in OpenAI's service."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchemaFormat(OpenAIBaseModel):
    """The `json_schema` member of a response format."""

    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    model_config = ConfigDict(extra="ignore", populate_by_name=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls_and_unknown(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class ResponseFormat(OpenAIBaseModel):
    """The shape that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class SamplingFields(RequestBody):
    """Fields that completions and chat completions have in common."""

    model: str
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    n: int = 1
    best_of: int | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_p: float = 1.0
    user: str | None = None
    # beyond OpenAI
    use_beam_search: bool = False
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    length_penalty: float = 1.0
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(default=None, ge=1)
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = Field(default_factory=list)
    prompt_logprobs: int | None = Field(default=None, ge=0)
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    priority: int = 0
    cache_salt: str | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed with stream = true")
        if self.stream and self.prompt_logprobs:
            raise ValueError("prompt_logprobs: not available with stream = true")
        return self

    @model_validator(mode="after")
    def _check_beam_search(self) -> SamplingFields:
        """A search reports sequences, not the tokens that it weighed."""
        if self.use_beam_search and self.wants_logprobs:
            raise ValueError("logprobs: not available with use_beam_search; leave one out")
        if self.use_beam_search and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: not available with use_beam_search; leave one out")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether generated tokens are reported with their probabilities."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream holds the usage so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def guided_decoding(
        self, tool_schema: dict[str, Any] | None = None
    ) -> GuidedDecodingParams | None:
        """Return the structure that the answer must have, or None.

        Args:
            tool_schema: JSON schema that a forced tool call demands.

        Raises:
            RequestError: more than one structure is asked for.
        """
        wishes = self._structure_wishes(tool_schema)
        if not wishes:
            return None
        given = list(wishes)
        if len(given) > 1:
            raise RequestError(
                f"only one kind of structured output can be asked for, got {', '.join(given)}",
                given[1],
            )
        wish = wishes[given[0]]
        kind = {"guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
        key = "json_object" if wish is True else kind.get(given[0], "json")
        return GuidedDecodingParams(
            **{key: wish},
            backend=self.guided_decoding_backend,
            whitespace_pattern=self.guided_whitespace_pattern,
        )

    def schema_field(self, tool_schema: dict[str, Any] | None = None) -> str:
        """Return the field that a JSON schema came in, for errors that the engine finds in it."""
        wishes = self._structure_wishes(tool_schema)
        names = {"tool_choice": "tools"}  # that field holds the schema
        return next((names.get(name, name) for name in wishes), "guided_json")

    def _structure_wishes(self, tool_schema: dict[str, Any] | None) -> dict[str, Any]:
        wishes = {
            "guided_json": self.guided_json,
            "guided_regex": self.guided_regex,
            "guided_choice": self.guided_choice,
            "guided_grammar": self.guided_grammar,
            "tool_choice": tool_schema,
            "response_format": self._response_schema(),
        }
        return {name: wish for name, wish in wishes.items() if wish is not None}

    def _response_schema(self) -> dict[str, Any] | bool | None:
        wish = self.response_format
        if wish is None or wish.type == "text":
            return None
        if wish.type == "json_object":
            return True
        if wish.json_schema is None or wish.json_schema.json_schema is None:
            raise RequestError(
                "response_format.json_schema.schema: needed with type 'json_schema'",
                "response_format",
            )
        return wish.json_schema.json_schema

    def sampling_params(
        self,
        *,
        temperature: float,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
        output_kind: RequestOutputKind,
        tool_schema: dict[str, Any] | None = None,
    ) -> SamplingParams:
        """Return the engine's parameters; what differs between the endpoints is passed in.

        Raises:
            RequestError: a value is out of range, or values contradict each other.
        """
        return SamplingParams(
            n=self.n,
            best_of=self.best_of,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            temperature=temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            bad_words=self.bad_words,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            ignore_eos=self.ignore_eos,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            output_kind=output_kind,
            guided_decoding=self.guided_decoding(tool_schema),
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
        )

    def beam_search_params(self, *, temperature: float, max_tokens: int) -> BeamSearchParams:
        """Return the parameters of a beam search of width n; other sampling fields are ignored."""
        return BeamSearchParams(
            beam_width=self.n,
            max_tokens=max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=temperature,
            length_penalty=self.length_penalty,
        )
