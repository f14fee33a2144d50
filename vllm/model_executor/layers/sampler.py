"""Logits to tokens.

Called by the model runner once a step with the logits of all sampled rows. The order is that of
vLLM 0.6.3: user processors, grammar, bias and bans, penalties, temperature, top-k, top-p, min-p,
draw. A row's token depends on its own logits, parameters and (seed, branch, output position) alone;
never on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm._custom_ops.sampling import (
    apply_penalties,
    argmax,
    filter_logits,
    sample,
    topk_logprobs,
)
from vllm.model_executor.layers.logits_rules import apply_bitmasks, apply_processors, apply_rules
from vllm.model_executor.layers.sampling_state import SamplingState
from vllm.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What is wanted of one row of the logits.

    Attributes:
        num_samples: draws from this row; draw i belongs to branch `state.branch + i`.
        token_mask: packed bitmask of a grammar, or None.
    """

    state: SamplingState
    num_samples: int = 1
    token_mask: bytes | None = None


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What one row got.

    Attributes:
        token_ids: one for each draw; empty if there is an error.
        logprobs: one entry for each draw, or None if not asked for. Log-softmax of what was drawn
            from: after temperature, penalties and filters, so a filtered token has -inf.
        error: why the row has no token, or None.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


class Sampler:
    """Chooses tokens; holds nothing between steps."""

    def __call__(self, logits_SV: Tensor, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Choose the tokens of a step.

        Args:
            logits_SV: float32 [S, V], one row for each request; changed in place.
            requests: what is wanted of each row.

        Returns:
            One result for each request, in order.
        """
        if all(r.state.is_plain and r.num_samples == 1 and r.token_mask is None for r in requests):
            ids, is_good = _draw(logits_SV, [(r.state, 0) for r in requests])
            return [
                SampleResult([token]) if good else SampleResult([], error=_NO_TOKEN)
                for token, good in zip(ids.tolist(), is_good, strict=True)
            ]
        errors = _change_logits(logits_SV, requests)
        return _sample_changed(logits_SV, requests, errors)


_NEVER = float("-inf")
_NO_TOKEN = (
    "no token can follow: the model's logits are not numbers, or the masks of the request "
    "(grammar, allowed_token_ids, bad_words, min_tokens, logit_bias, processors) leave none"
)


def _change_logits(logits_SV: Tensor, requests: Sequence[SampleRequest]) -> dict[int, str]:
    """Apply everything that comes before the temperature; returns the errors of rows."""
    errors: dict[int, str] = {}
    for row, request in enumerate(requests):
        if request.state.processors:
            error = apply_processors(logits_SV[row], request.state)
            if error is not None:
                errors[row] = error
    apply_bitmasks(
        logits_SV,
        [(row, r.token_mask) for row, r in enumerate(requests) if r.token_mask is not None],
    )
    for row, request in enumerate(requests):
        if request.state.has_rules and row not in errors:
            error = apply_rules(logits_SV[row], request.state)
            if error is not None:
                errors[row] = error
    _penalise(logits_SV, [r.state for r in requests])
    return errors


def _penalise(logits_SV: Tensor, states: Sequence[SamplingState]) -> None:
    rows = [row for row, state in enumerate(states) if state.seen is not None]
    if not rows:
        return
    sizes = np.zeros(len(states) + 1, dtype=np.int64)
    ids, counts = [], []
    for row in rows:
        seen = states[row].seen
        assert seen is not None
        sizes[row + 1] = len(seen.ids)
        ids.append(seen.ids)
        counts.append(seen.counts)
    device = logits_SV.device

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    apply_penalties(
        logits_SV,
        torch.from_numpy(np.cumsum(sizes)).to(device),
        torch.from_numpy(np.concatenate(ids)).to(device),
        torch.from_numpy(np.concatenate(counts)).to(device),
        floats([s.params.repetition_penalty for s in states]),
        floats([s.params.frequency_penalty for s in states]),
        floats([s.params.presence_penalty for s in states]),
    )


def _sample_changed(
    logits_SV: Tensor, requests: Sequence[SampleRequest], errors: dict[int, str]
) -> list[SampleResult]:
    """Draw every sample of every row, and collect logprobs where they are asked for."""
    draws = [(r.state, i) for r in requests for i in range(r.num_samples)]
    if len(draws) != len(requests):
        repeats = [row for row, r in enumerate(requests) for _ in range(r.num_samples)]
        logits_SV = logits_SV[torch.tensor(repeats, device=logits_SV.device)]
    ids, is_good = _draw(logits_SV, draws)
    logprobs = _collect_logprobs(logits_SV, draws, ids)
    tokens = ids.tolist()
    results = []
    first = 0
    for row, request in enumerate(requests):
        span = range(first, first + request.num_samples)
        first += request.num_samples
        if row in errors or not all(is_good[i] for i in span):
            results.append(SampleResult([], error=errors.get(row, _NO_TOKEN)))
            continue
        has_logprobs = request.state.params.num_logprobs is not None
        results.append(
            SampleResult(
                [tokens[i] for i in span],
                logprobs=[logprobs[i] for i in span] if has_logprobs else None,
            )
        )
    return results


Draw = tuple[SamplingState, int]  # a row's state, and the index of the draw among its samples


def _draw(logits_SV: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, list[bool]]:
    """Draw one token a row.

    Returns:
        ids: int64 [S].
        is_good: for each row, whether its token can follow (its logit is a number above -inf).
    """
    ids = torch.empty(len(draws), dtype=torch.int64, device=logits_SV.device)
    if all(state.params.is_greedy for state, _ in draws):
        argmax(ids, logits_SV)
    else:
        seeds = [state.get_stream_seed(i) for state, i in draws]
        offsets = [state.num_outputs for state, _ in draws]
        sample(
            ids,
            logits_SV,
            *_filters(draws, logits_SV.device),
            torch.tensor(seeds, dtype=torch.int64, device=logits_SV.device),
            torch.tensor(offsets, dtype=torch.int64, device=logits_SV.device),
        )
    chosen = logits_SV.gather(1, ids.unsqueeze(1)).flatten().tolist()
    return ids, [logit > _NEVER for logit in chosen]  # false for NaN too


def _filters(draws: Sequence[Draw], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return temperature, top_p, top_k and min_p of each draw."""
    params = [state.params for state, _ in draws]

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return (
        column([p.temperature for p in params]),
        column([p.top_p for p in params]),
        column([p.top_k for p in params], torch.int32),
        column([p.min_p for p in params]),
    )


def _collect_logprobs(
    logits_SV: Tensor, draws: Sequence[Draw], ids: Tensor
) -> dict[int, TokenLogprobs]:
    """Return the logprobs of the draws that want them, by index of the draw."""
    wanted = [i for i, (s, _) in enumerate(draws) if s.params.num_logprobs is not None]
    if not wanted:
        return {}
    rows = torch.tensor(wanted, device=logits_SV.device)
    kept = [draws[i] for i in wanted]
    logits = logits_SV[rows]
    if not all(state.params.is_greedy for state, _ in kept):
        filter_logits(logits, *_filters(kept, logits.device))
    limits = [state.params.num_logprobs or 0 for state, _ in kept]
    return dict(zip(wanted, compute_logprobs(logits, ids[rows], limits), strict=True))


def compute_logprobs(
    logits_SV: Tensor, chosen_ids: Tensor, num_logprobs: Sequence[int]
) -> list[TokenLogprobs]:
    """Return log-softmax values of the chosen token and the most likely ones of each row.

    Args:
        logits_SV: float32 [S, V]; not changed.
        chosen_ids: int64 [S].
        num_logprobs: how many of the most likely tokens each row wants, 0 or more.
    """
    size, vocab = logits_SV.shape
    if size == 0:
        return []
    width = 1 + min(max(num_logprobs), vocab)
    device = logits_SV.device
    values = torch.empty((size, width), dtype=torch.float32, device=device)
    ids = torch.empty((size, width), dtype=torch.int64, device=device)
    ranks = torch.empty(size, dtype=torch.int64, device=device)
    topk_logprobs(values, ids, ranks, logits_SV, chosen_ids)
    return [
        TokenLogprobs(token_ids=row_ids[: 1 + k], logprobs=row_values[: 1 + k], rank=rank)
        for row_ids, row_values, rank, k in zip(
            ids.tolist(), values.tolist(), ranks.tolist(), num_logprobs, strict=True
        )
    ]
