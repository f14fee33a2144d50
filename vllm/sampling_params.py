"""How a request's tokens are chosen, where it stops and what is reported.

Made by users, by the HTTP layer and by `LLM.generate` (which also takes a dict); read by
`engine/input_processor.py`, which turns it into numbers for the workers. Never changed by the
engine: a caller may reuse one object for any number of requests. Imports no torch.
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, TypeAlias

import msgspec

from vllm.errors import RequestError
from vllm.guided_decoding import GuidedDecodingParams
from vllm.logger import init_logger, warn_once
from vllm.utils.field_checks import (
    check_int,
    check_not_empty,
    check_range,
    parse_bias,
    parse_callables,
    parse_count,
    parse_eos_ids,
    parse_list,
    parse_switch,
    parse_token_keys,
    to_builtin,
)

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "LogitsProcessor",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
]

logger = init_logger(__name__)

GREEDY_TEMPERATURE = 1e-5
LOWEST_TEMPERATURE = 0.01

LogitsProcessor: TypeAlias = Callable[..., Any]
"""(output ids, logits) -> logits, or (prompt ids, output ids, logits) -> logits."""


class SamplingType(IntEnum):
    """How the next token is chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RequestOutputKind(IntEnum):
    """What each output of a running request holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last output
    FINAL_ONLY = 2  # nothing until the end, then everything


def _parse_output_kind(value: object) -> RequestOutputKind:
    for kind in RequestOutputKind:
        if value == kind:
            return kind
    names = ", ".join(kind.name for kind in RequestOutputKind)
    raise RequestError(
        f"output_kind must be a RequestOutputKind ({names}), got {value!r}", param="output_kind"
    )


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """Sampling parameters of one request; names and defaults of the OpenAI API where it has them.

    Attributes:
        n: answers to return.
        best_of: answers to generate, of which the n likeliest are returned; None means n.
        presence_penalty, frequency_penalty: [-2, 2], over generated tokens.
        repetition_penalty: (0, 2], over prompt and generated tokens; above 1 discourages.
        temperature: 0 takes the likeliest token.
        top_p, top_k, min_p: keep the likeliest tokens only; -1 switches top_k off.
        seed: the same seed gives the same tokens, in any batch; None draws one.
        stop: strings that end the answer, cut off unless include_stop_str_in_output.
        stop_token_ids: ids that end it.
        ignore_eos: go on after the end-of-sequence token.
        max_tokens: most tokens to generate; None for as many as the model's length allows.
        min_tokens: no end before so many tokens.
        logprobs: likeliest tokens reported with each generated token (it is always among them).
        prompt_logprobs: the same for prompt tokens.
        detokenize: whether text is made.
        logits_processors: callables on the logits; in-process engines only.
        truncate_prompt_tokens: keep the last so many prompt tokens (applied by the HTTP layer).
        output_kind: see RequestOutputKind.
        guided_decoding: a form that the output must have.
        logit_bias: id -> value added to its logit, clamped to [-100, 100].
        allowed_token_ids: only these ids may be generated.
        bad_words: strings that may not be generated.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: Any | None = None
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    output_text_buffer_length: int = 0
    guided_decoding: GuidedDecodingParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None

    @classmethod
    def from_optional(
        cls,
        n: int | None = 1,
        best_of: int | None = None,
        presence_penalty: float | None = 0.0,
        frequency_penalty: float | None = 0.0,
        repetition_penalty: float | None = 1.0,
        temperature: float | None = 1.0,
        top_p: float | None = 1.0,
        top_k: int | None = -1,
        min_p: float | None = 0.0,
        seed: int | None = None,
        stop: str | list[str] | None = None,
        stop_token_ids: list[int] | None = None,
        include_stop_str_in_output: bool = False,
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        logits_processors: list[LogitsProcessor] | None = None,
        truncate_prompt_tokens: int | None = None,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        guided_decoding: GuidedDecodingParams | None = None,
        logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
        allowed_token_ids: list[int] | None = None,
        bad_words: list[str] | None = None,
    ) -> SamplingParams:
        """Build from values of which None stands for the default; ids in logit_bias may be text."""
        given = {name: value for name, value in locals().items() if name != "cls"}
        defaults = zip(cls.__struct_fields__, cls.__struct_defaults__, strict=True)
        fields = {n: d if given.get(n) is None else given[n] for n, d in defaults}
        fields["max_tokens"] = max_tokens  # here None is a value of its own
        fields["logit_bias"] = parse_token_keys(logit_bias)
        return cls(**fields)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Build from a dict of field names.

        Raises: TypeError naming the nearest field for an unknown one; RequestError for a bad value.
        """
        known = set(cls.__struct_fields__)
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"SamplingParams has no field {name!r}{hint}")
        values = dict(fields)
        guided = values.get("guided_decoding")
        if isinstance(guided, Mapping):
            values["guided_decoding"] = GuidedDecodingParams(**guided)
        return cls(**values)

    def __post_init__(self) -> None:
        self.verify()
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            warn_once(
                logger,
                f"a temperature between 0 and {LOWEST_TEMPERATURE} overflows the softmax; "
                f"{LOWEST_TEMPERATURE} is used (0 takes the likeliest token)",
            )
            self.temperature = LOWEST_TEMPERATURE
        if self.is_greedy:
            self._reset_filters()
        if self.stop and not self.include_stop_str_in_output:
            self.output_text_buffer_length = max(len(s) for s in self.stop) - 1

    def verify(self) -> None:
        """Bring every field to one form and check it; the engine does again: some are set later.

        Raises: RequestError naming the field; TypeError for a top_k that is no integer.
        """
        self._read_values()
        self._read_collections()
        self._check_numbers()
        self._check_lengths()
        self._check_lists()

    def _read_values(self) -> None:
        for name in _NUMBERS:  # of numpy and others too; what is no number is refused below
            if type(value := getattr(self, name)) not in _PLAIN_NUMBERS:
                setattr(self, name, to_builtin(value))
        for name in _SWITCHES:
            if type(value := getattr(self, name)) is not bool:
                setattr(self, name, parse_switch(value, name))
        self.seed = None if self.seed == -1 else self.seed
        self.logprobs = parse_count(self.logprobs)
        self.prompt_logprobs = parse_count(self.prompt_logprobs)
        if type(self.output_kind) is not RequestOutputKind:
            self.output_kind = _parse_output_kind(self.output_kind)

    def _read_collections(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self.stop = parse_list(stop, "stop", str) or []
        self.stop_token_ids = parse_list(self.stop_token_ids, "stop_token_ids", int) or []
        self.bad_words = parse_list(self.bad_words, "bad_words", str) or []
        self.allowed_token_ids = parse_list(self.allowed_token_ids, "allowed_token_ids", int)
        self.logit_bias = parse_bias(self.logit_bias)
        self.logits_processors = parse_callables(self.logits_processors, "logits_processors")
        if not isinstance(self.guided_decoding, GuidedDecodingParams | None):
            raise RequestError(
                "guided_decoding must be GuidedDecodingParams, such as "
                f"GuidedDecodingParams(json_object=True), got {self.guided_decoding!r}",
                param="guided_decoding",
            )

    def _check_numbers(self) -> None:
        check_int("n", self.n, low=1)
        if self.best_of is not None:
            check_int("best_of", self.best_of, low=1)
            if self.best_of < self.n:
                raise RequestError(
                    f"best_of must be at least n, got best_of={self.best_of} and n={self.n}",
                    param="best_of",
                )
        check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_range("repetition_penalty", self.repetition_penalty, 0.0, 2.0, open_low=True)
        check_range("temperature", self.temperature, 0.0, math.inf)
        check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_range("min_p", self.min_p, 0.0, 1.0)
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool):
            raise TypeError(f"top_k must be an integer, got {self.top_k!r}")
        if self.top_k != -1 and self.top_k < 1:
            raise RequestError(
                f"top_k must be -1 (off) or at least 1, got {self.top_k}", param="top_k"
            )
        if self.seed is not None:
            check_int("seed", self.seed, low=-(2**63), high=2**63 - 1)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, low=1)
        check_int("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens, got min_tokens={self.min_tokens} and "
                f"max_tokens={self.max_tokens}",
                param="min_tokens",
            )
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, low=0)
        if self.prompt_logprobs is not None:
            check_int("prompt_logprobs", self.prompt_logprobs, low=0)
        if self.truncate_prompt_tokens is not None:
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, low=1)

    def _check_lists(self) -> None:
        if any(not text for text in self.stop or ()):
            raise RequestError("stop may not hold an empty string", param="stop")
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop strings need text: set detokenize=True, or use stop_token_ids", param="stop"
            )
        if any(not text for text in self.bad_words or ()):
            raise RequestError("bad_words may not hold an empty string", param="bad_words")
        check_not_empty("allowed_token_ids", self.allowed_token_ids)
        if self.output_kind == RequestOutputKind.DELTA and self.num_branches > self.n:
            raise RequestError(
                "best_of above n cannot be streamed as deltas: the best are known only at the end",
                param="best_of",
            )

    def _reset_filters(self) -> None:
        self.top_p, self.top_k, self.min_p = 1.0, -1, 0.0
        if self.num_branches > 1:
            name = "n" if self.best_of is None else "best_of"
            raise RequestError(
                f"{name} must be 1 when temperature is 0, got {self.num_branches}: every answer "
                "would be the same; set a temperature",
                param=name,
            )

    @property
    def num_branches(self) -> int:
        """Answers that are generated, at least n."""
        return self.best_of or self.n

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def sampling_type(self) -> SamplingType:
        """GREEDY, RANDOM, or RANDOM_SEED when a seed was given."""
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Every id that ends the answer, as far as known here."""
        return set(self.stop_token_ids or ())

    def update_from_generation_config(
        self, generation_config: Mapping[str, Any], eos_token_id: int | None = None
    ) -> None:
        """Add the end tokens that generation_config.json names beside the tokenizer's.

        Nothing else of that file is applied.
        """
        if self.ignore_eos:
            return
        extra = parse_eos_ids(generation_config.get("eos_token_id"))
        known = [*(self.stop_token_ids or ()), eos_token_id]
        self.stop_token_ids = known[:-1] + [i for i in extra if i not in known]

    def clone(self) -> SamplingParams:
        """Return a deep copy that shares the logits processors (they may not be copyable)."""
        processors = parse_callables(self.logits_processors, "logits_processors")
        shared = {id(p): p for p in processors or ()}
        return copy.deepcopy(self, memo=shared)


_PLAIN_NUMBERS = frozenset((int, float, type(None)))
_NUMBERS = tuple(
    name
    for name, kind in SamplingParams.__annotations__.items()
    if set(kind.split(" | ")) <= {"int", "float", "None"}
)
_SWITCHES = tuple(n for n, kind in SamplingParams.__annotations__.items() if kind == "bool")


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """Parameters of a beam search."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output"):
            setattr(self, name, parse_switch(getattr(self, name), name))
        check_int("beam_width", self.beam_width, low=1)
        check_int("max_tokens", self.max_tokens, low=1)
        check_range("temperature", self.temperature, 0.0, math.inf)
        check_range("length_penalty", self.length_penalty, -math.inf, math.inf)
