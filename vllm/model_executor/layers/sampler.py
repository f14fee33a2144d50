"""Logits to tokens.

Called by the model runner once a step with the logits of all sampled rows. The order is that of
vLLM 0.6.3: user processors, grammar, bias and bans, penalties, temperature, top-k, top-p, min-p,
draw. A row's token depends on its own logits, parameters and (seed, branch, output position) alone;
never on its neighbours. Nothing here waits for a GPU before `PendingSamples.wait`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vllm._custom_ops.sampling import (
    apply_penalties,
    argmax,
    filter_logits,
    keep_possible,
    sample,
)
from vllm.model_executor.layers.draw_columns import DrawColumnCache, DrawColumns
from vllm.model_executor.layers.logits_rules import apply_bitmasks, apply_processors, apply_rules
from vllm.model_executor.layers.sampling_state import SamplingState
from vllm.model_executor.layers.token_logprobs import launch_logprobs, read_logprobs
from vllm.model_executor.layers.transfer import Download, upload
from vllm.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What is wanted of one row of the logits.

    Attributes:
        num_samples: draws from this row; draw i belongs to branch `state.branch + i`.
        token_mask: packed bitmask of a grammar, or None.
        num_outputs: tokens generated before this one, those whose ids the host does not know yet
            included; the offset in the random stream.
    """

    state: SamplingState
    num_samples: int = 1
    token_mask: bytes | None = None
    num_outputs: int = field(kw_only=True)

    @property
    def is_plain(self) -> bool:
        """Whether nothing but one draw concerns this row."""
        return self.state.is_plain and self.num_samples == 1 and self.token_mask is None


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


_NO_TOKEN = (
    "no token can follow: the model's logits are not numbers, or the masks of the request "
    "(grammar, allowed_token_ids, bad_words, min_tokens, logit_bias, processors) leave none"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingSamples:
    """The tokens of a step, chosen in stream order.

    Attributes:
        next_ids: int64 [requests] on the device, the first draw of each request; some id of the
            vocabulary for a row with an error.
        requests: what was wanted.
        columns: the draws' columns.
        errors: of rows, known before anything ran.
        download: ids of all draws, -1 for one that cannot follow; then, where any draw has
            logprobs, their values, ids and ranks.
    """

    next_ids: Tensor
    requests: Sequence[SampleRequest]
    columns: DrawColumns
    errors: Mapping[int, str]
    download: Download

    def wait(self) -> list[SampleResult]:
        """Return one result for each request, in order."""
        tokens, *tables = self.download.wait()
        ids = tokens.tolist()
        if not tables and not self.errors and len(ids) == len(self.requests):
            return [
                SampleResult([token]) if token >= 0 else SampleResult([], error=_NO_TOKEN)
                for token in ids
            ]
        entries: dict[int, TokenLogprobs] = {}
        if tables:
            values, chosen, ranks = tables
            found = read_logprobs(values, chosen, ranks, self.columns.num_logprobs)
            entries = dict(zip(self.columns.wanted, found, strict=True))
        results = []
        first = 0
        for row, request in enumerate(self.requests):
            span = range(first, first + request.num_samples)
            first += request.num_samples
            if row in self.errors or min(ids[i] for i in span) < 0:
                results.append(SampleResult([], error=self.errors.get(row, _NO_TOKEN)))
                continue
            has_logprobs = request.state.params.num_logprobs is not None
            results.append(
                SampleResult(
                    [ids[i] for i in span],
                    logprobs=[entries[i] for i in span] if has_logprobs else None,
                )
            )
        return results


class Sampler:
    """Chooses tokens; between steps it holds only copies of the last step's parameters."""

    def __init__(self) -> None:
        self._columns = DrawColumnCache()

    def __call__(self, logits_SV: Tensor, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Choose the tokens of a step and wait for them; arguments as in `start`."""
        return self.start(logits_SV, requests).wait()

    def start(self, logits_SV: Tensor, requests: Sequence[SampleRequest]) -> PendingSamples:
        """Queue the choice of a step's tokens on the current stream; on a CPU, make it.

        Only users' logits processors can make the host wait.

        Args:
            logits_SV: float32, on a GPU also bfloat16 or float16; [S, V], one row for each request;
                may be changed in place.
            requests: what is wanted of each row.
        """
        errors: dict[int, str] = {}
        is_plain = all(request.is_plain for request in requests)
        columns = self._columns.get(requests, logits_SV.device)
        if not is_plain or columns.parameters is not None or columns.wanted:
            logits_SV = logits_SV.float()  # the most likely token is found without
        if not is_plain:
            errors = _change_logits(logits_SV, requests)
        if columns.rows is not None:
            logits_SV = logits_SV[columns.rows]
        ids = _draw(logits_SV, columns)
        found = [_drop_impossible(logits_SV, ids)]
        if columns.wanted:
            found.extend(_launch_wanted(logits_SV, columns, ids))
        return PendingSamples(
            next_ids=ids if columns.first_draws is None else ids[columns.first_draws],
            requests=requests,
            columns=columns,
            errors=errors,
            download=Download(found),
        )


_NEVER = float("-inf")


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
            error = apply_rules(logits_SV[row], request.state, request.num_outputs)
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

    def floats(values: list[float]) -> np.ndarray:
        return np.array(values, dtype=np.float32)

    columns = (
        np.cumsum(sizes),
        np.concatenate(ids),
        np.concatenate(counts),
        floats([s.params.repetition_penalty for s in states]),
        floats([s.params.frequency_penalty for s in states]),
        floats([s.params.presence_penalty for s in states]),
    )
    apply_penalties(logits_SV, *upload(columns, logits_SV.device))


def _draw(logits_SV: Tensor, columns: DrawColumns) -> Tensor:
    """Draw one token a row; int64 [S]."""
    ids = torch.empty(len(logits_SV), dtype=torch.int64, device=logits_SV.device)
    if columns.parameters is None:
        argmax(ids, logits_SV)
    else:
        parameters = columns.parameters
        sample(ids, logits_SV, *parameters.filters, parameters.seeds, parameters.offsets)
    return ids


def _drop_impossible(logits_SV: Tensor, ids: Tensor) -> Tensor:
    """Return the ids, -1 where the logit is -inf or NaN; one launch on a GPU."""
    if ids.is_cuda:
        found = torch.empty_like(ids)
        keep_possible(found, ids, logits_SV)
        return found
    chosen = logits_SV.gather(1, ids.unsqueeze(1)).squeeze(1)
    return torch.where(chosen > _NEVER, ids, -1)


def _launch_wanted(
    logits_SV: Tensor, columns: DrawColumns, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the logprobs of the draws that want them."""
    filters: Sequence[Tensor] = ()
    if columns.parameters is not None:
        filters = columns.parameters.filters
    rows = columns.wanted_rows
    if rows is not None:
        logits_SV, ids = logits_SV[rows], ids[rows]
        filters = [column[rows] for column in filters]
    if filters:
        filter_logits(logits_SV, *filters)
    return launch_logprobs(logits_SV, ids, columns.num_logprobs)
