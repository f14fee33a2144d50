"""What the scheduler tells the workers in one step, and what comes back.

A :class:`StepPlan` travels down (in process, or broadcast to every rank), a :class:`StepOutput`
travels up. Both are plain data: ids, counts and lists; no tensor, no torch. Block ids are the
scheduler's; each rank turns them into its own offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec


class RowSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one row are chosen; the numeric part of SamplingParams, resolved.

    `seed` is never None: an unseeded request got a random one at admission, so that a token depends
    only on (seed, branch, output position) and survives preemption and any batching.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < 1e-5

    @property
    def reads_outputs(self) -> bool:
        """Whether a rule counts or compares the tokens generated so far, the newest included."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or any(len(word) > 1 for word in self.bad_words_token_ids)
        )


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that enters the workers' batch: new, resumed after preemption, or a branch.

    Attributes:
        seq_id: number of the sequence, unique for the life of the engine.
        branch: index among the n of its request; part of the random stream.
        token_ids: prompt and all tokens generated so far.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: how many already have their cache rows (prefix hit, fork).
        block_ids: for each group, the block table, all of it; -1 where nothing is stored.
        goal: first position from which the sequence, or another one that shares its beginning, goes
            on; None is the end of `token_ids`. See `find_first_token`.
        logits_processors: user callables (in-process engine only), else empty.
    """

    seq_id: int
    branch: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]
    sampling: RowSampling
    goal: int | None = None
    logits_processors: tuple[Callable[..., Any], ...] = ()


def find_first_token(goal: int, reach: int, grain_tokens: int) -> int:
    """Return the first token of a prompt that a layer is run for, a multiple of the grain.

    Args:
        goal: see NewRow.
        reach: tokens before it that the layer has to be run for.
        grain_tokens: a multiple of every block size.
    """
    return max(0, goal - reach) // grain_tokens * grain_tokens


class BlockCopy(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Copy one block inside a group before the forward pass (copy-on-write, state checkpoint)."""

    group: int
    source: int
    target: int


class PlanRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One sequence's share of a step.

    Attributes:
        num_computed_tokens: cache rows that exist before the step.
        num_new_tokens: tokens processed in the step; ids come from the worker's own row.
        new_block_ids: for each group, blocks appended to the table (empty for rows in new_rows); -1
            stands for tokens that need not be stored.
        num_samples: 0 while the prompt is unfinished, 1 as a rule, n where n branches fork here.
    """

    seq_id: int
    num_computed_tokens: int
    num_new_tokens: int
    new_block_ids: tuple[list[int], ...]
    num_samples: int = 1


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step, in the order in which the workers apply it.

    1. rows in `dropped` leave (finished, aborted, preempted); 2. the bytes of `zero_superblocks`
    are zeroed; 3. `new_rows` enter; 4. `copies` run; 5. `rows` are computed. A row whose last id is
    not yet known on the host (overlap) takes it from the worker's own memory of the previous step.

    Attributes:
        zero_superblocks: superblocks whose bytes belonged to another group before.
        rows: rows with one new token first.
        token_masks: for rows under a grammar, the packed bitmask of allowed ids, int32 words as
            bytes.
    """

    step: int
    dropped: list[int] = msgspec.field(default_factory=list)
    zero_superblocks: list[int] = msgspec.field(default_factory=list)
    new_rows: list[NewRow] = msgspec.field(default_factory=list)
    copies: list[BlockCopy] = msgspec.field(default_factory=list)
    rows: list[PlanRow] = msgspec.field(default_factory=list)
    token_masks: dict[int, bytes] = msgspec.field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens processed in this step."""
        return sum(r.num_new_tokens for r in self.rows)

    @property
    def is_empty(self) -> bool:
        """Whether the workers have nothing at all to do."""
        return not (
            self.rows or self.dropped or self.new_rows or self.copies or self.zero_superblocks
        )


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log-probabilities at one position.

    Attributes:
        token_ids: the chosen token first, then the most likely ones in falling order.
        logprobs: same order.
        rank: rank of the chosen token, from 1.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class RowOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a step produced for one row.

    Attributes:
        token_ids: one id for each sample asked for (num_samples); empty in mid prompt.
        logprobs: one entry for each sample, or None.
        prompt_logprobs: entries for the prompt positions that this step predicted, or None. The
            entry at index i belongs to prompt token `prompt_start + i`.
    """

    seq_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_start: int = 0
    error: str | None = None


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step produced, rows in the order of the plan."""

    step: int
    rows: list[RowOutput]
    forward_ms: float = 0.0
