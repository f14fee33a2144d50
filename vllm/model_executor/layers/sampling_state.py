"""What the sampler remembers of one sequence between steps.

Made by the worker's input batch when a row enters, told every token that is appended to it. Holds
counts of tokens seen, never a vector of the vocabulary's width.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm.step import NewRow, RowSampling

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix_seed(seed: int, branch: int) -> int:
    """Return the key of a branch's random stream, a signed 64-bit number.

    Every bit of both arguments counts, so that neighbouring seeds and branches are unrelated.
    Source: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    value = seed & _MASK64
    for addend in (_GOLDEN, (_GOLDEN * (branch + 1)) & _MASK64):
        value = (value + addend) & _MASK64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
        value ^= value >> 31
    return value - 2**64 if value >= 2**63 else value


class SeenTokens:
    """The distinct tokens of a sequence and how often each occurs in its output."""

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        counts = Counter(output_ids)
        ids = list(dict.fromkeys(prompt_ids))
        seen = set(ids)
        ids += [token for token in counts if token not in seen]
        self._index = {token: i for i, token in enumerate(ids)}
        self._size = len(ids)
        self._ids = np.array(ids + [0] * 64, dtype=np.int64)
        self._counts = np.array([counts[token] for token in ids] + [0] * 64, dtype=np.int32)

    def append(self, token: int) -> None:
        """Count one more output token."""
        index = self._index.get(token)
        if index is None:
            index = self._size
            if index == len(self._ids):
                self._ids = np.resize(self._ids, 2 * index)
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._index[token] = index
            self._ids[index] = token
            self._size += 1
        self._counts[index] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct tokens, int64 [N]."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.int32]:
        """Occurrences of each in the output, int32 [N]; 0 for one of the prompt only."""
        return self._counts[: self._size]


class SamplingState:
    """One sequence as the sampler sees it.

    Attributes:
        num_outputs: tokens that `append` was told of or that were there before; a draw's place in
            the random stream is said by its request, which also counts tokens on their way.
        stream_seed: key of the random stream of this branch.
        prompt_ids, output_ids: kept only where a rule reads them (processors, bad words), else
            empty.
        bias_ids, bias_values: logit_bias as arrays, or None.
        allowed_ids: allowed_token_ids as an array, or None.
        tensors: what the rules of this row have on the device, by the name of the rule.
        banned: the tokens behind tensors["banned"].
        seen: token counts where a penalty needs them, else None.
        has_rules: whether logits are changed before the penalties.
        is_plain: whether nothing but the draw concerns this row.
    """

    def __init__(self, row: NewRow) -> None:
        params = row.sampling
        self.params: RowSampling = params
        self.branch = row.branch
        self.num_outputs = len(row.token_ids) - row.num_prompt_tokens
        self.stream_seed = mix_seed(params.seed, row.branch)
        self.processors = tuple(_bind_processor(p) for p in row.logits_processors)
        self._keeps_ids = bool(self.processors or params.bad_words_token_ids)
        self.prompt_ids = row.token_ids[: row.num_prompt_tokens] if self._keeps_ids else []
        self.output_ids = row.token_ids[row.num_prompt_tokens :] if self._keeps_ids else []
        bias, allowed = params.logit_bias, params.allowed_token_ids
        self.bias_ids = np.array(list(bias), dtype=np.int64) if bias else None
        self.bias_values = np.array(list(bias.values()), dtype=np.float32) if bias else None
        self.allowed_ids = None if allowed is None else np.array(allowed, dtype=np.int64)
        self.tensors: dict[str, list[Tensor]] = {}
        self.banned: list[int] = []
        self.has_penalties = (
            params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or params.repetition_penalty != 1.0
        )
        self.seen = (
            SeenTokens(
                row.token_ids[: row.num_prompt_tokens], row.token_ids[row.num_prompt_tokens :]
            )
            if self.has_penalties
            else None
        )
        self.has_rules = bool(
            self.processors
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.bad_words_token_ids
            or (params.min_tokens and params.stop_token_ids)
        )
        self.is_plain = not (
            self.has_rules or self.has_penalties or params.num_logprobs is not None
        )

    def append(self, token: int) -> None:
        """Take note of a token that was appended to the sequence."""
        self.num_outputs += 1
        if self._keeps_ids:
            self.output_ids.append(token)
        if self.seen is not None:
            self.seen.append(token)

    def get_stream_seed(self, sample: int) -> int:
        """Return the key of the stream of the `sample`-th branch that forks off this row."""
        return self.stream_seed if sample == 0 else mix_seed(self.params.seed, self.branch + sample)


Processor = Callable[[list[int], list[int], Any], Any]


def _bind_processor(function: Callable[..., Any]) -> Processor:
    """Give a user's processor the signature (prompt_ids, output_ids, logits)."""
    try:
        takes_prompt = len(inspect.signature(function).parameters) == 3
    except (TypeError, ValueError):  # a callable without a signature, such as one written in C
        takes_prompt = False
    if takes_prompt:
        return function
    return lambda prompt_ids, output_ids, logits: function(output_ids, logits)
