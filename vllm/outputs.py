"""What a request gives back: texts, token ids, log-probabilities, times.

Made by `engine/output_processor.py`, read by users and by the HTTP layer. Plain data; imports no
torch. `vllm.sequence` re-exports Logprob and RequestMetrics under their 0.6.3 path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


@dataclass(slots=True)
class Logprob:
    """Log-probability of a token at a position.

    Attributes:
        rank: 1 for the likeliest; tokens of equal probability share a rank.
        decoded_token: its text in context; "" for a part of a character.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs: TypeAlias = list[dict[int, Logprob] | None]
SampleLogprobs: TypeAlias = list[dict[int, Logprob]]


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, wall-clock seconds since the epoch unless stated.

    Attributes:
        time_in_queue: seconds between arrival and the first step that worked on it.
        scheduler_time, model_forward_time, model_execute_time: not measured per request; None.
    """

    arrival_time: float
    last_token_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    time_in_queue: float | None = None
    finished_time: float | None = None
    scheduler_time: float | None = None
    model_forward_time: float | None = None
    model_execute_time: float | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer of a request.

    Attributes:
        index: position among the answers that were generated.
        token_ids: in DELTA outputs only the new ones.
        cumulative_logprob: sum over the tokens; None unless logprobs were asked for.
        finish_reason: "stop", "length" or "abort"; None while it runs.
        stop_reason: the stop string or stop token id that ended it; None for end of sequence.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        """Whether this answer has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request.

    Attributes:
        prompt: its text; None for prompts given as ids, and in later DELTA outputs.
        prompt_logprobs: one entry a prompt token, the first None; None unless asked for.
        num_cached_tokens: prompt tokens whose cache rows were found; None until scheduled.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """One embedding."""

    embedding: list[float] = field(default_factory=list)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The answer to an embedding request."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool


class RequestOutputFactory:
    """Makes the output of a finished or running request, as 0.6.3 names it."""

    @staticmethod
    def create(request: RequestOutput) -> RequestOutput:
        """Return the output; requests that hold embeddings do not exist here."""
        return request
