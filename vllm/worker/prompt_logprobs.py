"""Log-probabilities of prompt tokens, chunk by chunk.

Called by the model runners in steps that hold prompt rows which ask for them. They describe the
model: no temperature, penalty, mask or filter of the request enters (unlike the logprobs of sampled
tokens). Launching and waiting are apart, so that a step on a GPU is queued without a pause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.model_executor.layers.token_logprobs import launch_logprobs, read_logprobs
from vllm.model_executor.layers.transfer import Download, upload
from vllm.step import TokenLogprobs
from vllm.worker.input_batch import InputBatch, StepInput

_SLICE_TOKENS = 64  # logits of so many positions exist at a time


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Entries of one row; entry i belongs to prompt token `start + i`."""

    start: int
    entries: list[TokenLogprobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScoredRow:
    """A row whose prompt tokens `start` to `stop` - 1 a step predicts.

    Attributes:
        index: of the row in batch order.
        first_token: of the step, the one that predicts token `start`.
        num_logprobs: how many of the most likely tokens are wanted beside each.
    """

    index: int
    start: int
    stop: int
    first_token: int
    num_logprobs: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingPromptLogprobs:
    """The prompt logprobs of a step, found in stream order.

    Attributes:
        rows: that have some.
        download: values, ids and ranks of each of them; None without rows.
    """

    rows: Sequence[_ScoredRow]
    download: Download | None

    def wait(self) -> dict[int, PromptLogprobs]:
        """Return what was found, by index of the row in batch order."""
        if self.download is None:
            return {}
        tables = iter(self.download.wait())
        found = {}
        for row in self.rows:
            wanted = [row.num_logprobs] * (row.stop - row.start)
            entries = read_logprobs(next(tables), next(tables), next(tables), wanted)
            found[row.index] = PromptLogprobs(start=row.start, entries=entries)
        return found


def launch_prompt_logprobs(
    step: StepInput,
    hidden_TE: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    input_batch: InputBatch,
) -> PendingPromptLogprobs:
    """Queue the prompt logprobs that this step can give; on a CPU, find them.

    A step that computes positions p…q predicts prompt tokens p + 1…q + 1; the first prompt token
    has no entry, and what the last one predicts is no longer prompt. Every rank must call this (the
    logits are gathered).
    """
    rows = _list_rows(step)
    if not rows:
        return PendingPromptLogprobs(rows=(), download=None)
    ids = [input_batch.get_tokens(step.rows[row.index], row.start, row.stop) for row in rows]
    tables: list[Tensor] = []
    for row, targets in zip(rows, upload(ids, hidden_TE.device), strict=True):
        pieces = []
        for offset in range(0, row.stop - row.start, _SLICE_TOKENS):
            chosen = targets[offset : offset + _SLICE_TOKENS]
            first = row.first_token + offset
            logits = compute_logits(hidden_TE[first : first + len(chosen)])
            pieces.append(launch_logprobs(logits, chosen, [row.num_logprobs]))
        tables += map(torch.cat, zip(*pieces, strict=True))
    return PendingPromptLogprobs(rows=rows, download=Download(tables))


def collect_prompt_logprobs(
    step: StepInput,
    hidden_TE: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    input_batch: InputBatch,
) -> dict[int, PromptLogprobs]:
    """Launch and wait at once; arguments as in `launch_prompt_logprobs`."""
    return launch_prompt_logprobs(step, hidden_TE, compute_logits, input_batch).wait()


def _list_rows(step: StepInput) -> list[_ScoredRow]:
    rows, first_token = [], 0
    for index, (plan_row, row) in enumerate(zip(step.plan_rows, step.rows, strict=True)):
        wanted = row.state.params.num_prompt_logprobs
        start = plan_row.num_computed_tokens + 1
        stop = min(start + plan_row.num_new_tokens, row.num_prompt_tokens)
        if wanted is not None and start < stop:
            rows.append(
                _ScoredRow(
                    index=index,
                    start=start,
                    stop=stop,
                    first_token=first_token,
                    num_logprobs=wanted,
                )
            )
        first_token += plan_row.num_new_tokens
    return rows
