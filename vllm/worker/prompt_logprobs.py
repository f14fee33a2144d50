"""Log-probabilities of prompt tokens, chunk by chunk.

Called by the model runner in steps that hold prompt rows which ask for them. They describe the
model: no temperature, penalty, mask or filter of the request enters (unlike the logprobs of sampled
tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.model_executor.layers.sampler import compute_logprobs
from vllm.step import TokenLogprobs
from vllm.worker.input_batch import InputBatch, StepInput

_SLICE_TOKENS = 64  # logits of so many positions exist at a time


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Entries of one row; entry i belongs to prompt token `start + i`."""

    start: int
    entries: list[TokenLogprobs]


def collect_prompt_logprobs(
    step: StepInput,
    hidden_TE: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    input_batch: InputBatch,
) -> dict[int, PromptLogprobs]:
    """Return the prompt logprobs that this step can give, by index of the row in batch order.

    A step that computes positions p…q predicts prompt tokens p + 1…q + 1; the first prompt token
    has no entry, and what the last one predicts is no longer prompt. Every rank must call this (the
    logits are gathered).
    """
    found: dict[int, PromptLogprobs] = {}
    for index, (plan_row, row) in enumerate(zip(step.plan_rows, step.rows, strict=True)):
        wanted = row.state.params.num_prompt_logprobs
        start = plan_row.num_computed_tokens + 1
        stop = min(start + plan_row.num_new_tokens, row.num_prompt_tokens)
        if wanted is None or start >= stop:
            continue
        first = int(step.batch.cu_query_lens[index])
        tokens = input_batch.get_tokens(row, start, stop)
        targets = torch.from_numpy(tokens).to(hidden_TE.device)
        entries: list[TokenLogprobs] = []
        for offset in range(0, stop - start, _SLICE_TOKENS):
            ids = targets[offset : offset + _SLICE_TOKENS]
            logits = compute_logits(hidden_TE[first + offset : first + offset + len(ids)])
            entries.extend(compute_logprobs(logits, ids, [wanted] * len(ids)))
        found[index] = PromptLogprobs(start=start, entries=entries)
    return found
