"""Beams: what a beam search keeps, and how its results are scored.

Used by `LLM.beam_search` and by `AsyncLLMEngine.beam_search`, which run the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vllm.outputs import Logprob
from vllm.sampling_params import BeamSearchParams

_MAX_EXPONENT = 600.0
"""Of e, in a score: a float holds 1e260 times any sum of log-probabilities."""


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam.

    Attributes:
        tokens: prompt and generated ids.
        cum_logprob: sum of the log-probabilities of the generated ids.
        text: set at the end of a search.
        finish_reason: "stop" when it ended with the end token, else "length".
    """

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str = "length"


@dataclass(slots=True)
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class BeamSearchInstance:
    """A search in progress.

    Attributes:
        beams: those that still grow, at most the width.
        completed: those that have ended.
    """

    beams: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = field(default_factory=list)

    @classmethod
    def from_prompt(cls, prompt_tokens: list[int]) -> BeamSearchInstance:
        """Start a search with one empty beam."""
        return cls(beams=[BeamSearchSequence(tokens=list(prompt_tokens))])

    def advance(
        self,
        candidates: Iterable[Mapping[int, Logprob]],
        params: BeamSearchParams,
        eos_token_id: int | None,
    ) -> None:
        """Grow every beam by one token and keep the best.

        Args:
            candidates: for each beam in order, log-probabilities of its likeliest next tokens.
            params: of the search.
            eos_token_id: the token that ends a beam.
        """
        grown: list[BeamSearchSequence] = []
        for beam, choices in zip(self.beams, candidates, strict=True):
            for token_id, choice in choices.items():
                child = BeamSearchSequence(
                    tokens=[*beam.tokens, token_id], cum_logprob=beam.cum_logprob + choice.logprob
                )
                if token_id == eos_token_id and not params.ignore_eos:
                    child.finish_reason = "stop"
                    self.completed.append(child)
                else:
                    grown.append(child)
        grown.sort(key=lambda b: b.cum_logprob, reverse=True)
        self.beams = grown[: params.beam_width]

    def best(self, params: BeamSearchParams, eos_token_id: int | None) -> list[BeamSearchSequence]:
        """Return the best beams, ended or not, at most the width."""
        every = [*self.completed, *self.beams]
        every.sort(
            key=lambda b: beam_score(b.tokens, b.cum_logprob, eos_token_id, params.length_penalty),
            reverse=True,
        )
        return every[: params.beam_width]


def beam_score(
    tokens: list[int],
    cumulative_logprob: float,
    eos_token_id: int | None,
    length_penalty: float = 1.0,
) -> float:
    """Return cumulative log-probability / length ** length_penalty.

    The length counts prompt and generated tokens without a final end token. A power that no float
    holds counts as the largest or smallest that one does.
    """
    length = len(tokens)
    if length > 1 and tokens[-1] == eos_token_id:
        length -= 1
    exponent = length_penalty * math.log(length)
    if abs(exponent) > _MAX_EXPONENT:
        return cumulative_logprob * math.exp(-math.copysign(_MAX_EXPONENT, exponent))
    return cumulative_logprob / (length**length_penalty)
