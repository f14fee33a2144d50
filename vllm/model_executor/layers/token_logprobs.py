"""Log-probabilities of chosen tokens and of the most likely ones.

Called by the sampler and, for prompts, by `worker/prompt_logprobs.py`. Launching and reading are
two functions, so that a step on a GPU need not wait between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm._custom_ops.sampling import topk_logprobs
from vllm.step import TokenLogprobs

_MOST_ON_CUDA = 512  # alternatives that the CUDA op finds; more are rare enough to sort a row


def launch_logprobs(
    logits_SV: Tensor, chosen_ids: Tensor, num_logprobs: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-softmax values, ids and ranks as `topk_logprobs` writes them.

    Args:
        logits_SV: [S, V]; not changed.
        chosen_ids: int64 [S].
        num_logprobs: how many of the most likely tokens each row wants, 0 or more.
    """
    logits_SV = logits_SV.float()
    size, vocab = logits_SV.shape
    k = min(max(num_logprobs), vocab)
    device = logits_SV.device
    if k > _MOST_ON_CUDA and device.type != "cpu":
        return _sort_logprobs(logits_SV, chosen_ids, k)
    values = torch.empty((size, 1 + k), dtype=torch.float32, device=device)
    ids = torch.empty((size, 1 + k), dtype=torch.int64, device=device)
    ranks = torch.empty(size, dtype=torch.int64, device=device)
    topk_logprobs(values, ids, ranks, logits_SV, chosen_ids)
    return values, ids, ranks


def _sort_logprobs(logits_SV: Tensor, chosen_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    never, most = float("-inf"), torch.finfo(torch.float32).max
    cleaned = torch.nan_to_num(logits_SV, nan=never, posinf=most, neginf=never)
    logprobs = torch.log_softmax(cleaned.double(), -1).float()
    logprobs = torch.where(cleaned > never, logprobs, never)  # rows without any number too
    order = torch.sort(cleaned, dim=-1, descending=True, stable=True).indices[:, :k]
    ids = torch.cat((chosen_ids.unsqueeze(1), order), 1)
    chosen = cleaned.gather(1, chosen_ids.unsqueeze(1))
    return logprobs.gather(1, ids), ids, 1 + (cleaned > chosen).sum(-1)


def read_logprobs(
    values: Tensor, ids: Tensor, ranks: Tensor, num_logprobs: Sequence[int]
) -> list[TokenLogprobs]:
    """Return what `launch_logprobs` found, now on the host, as one entry a row."""
    return [
        TokenLogprobs(token_ids=row_ids[: 1 + k], logprobs=row_values[: 1 + k], rank=rank)
        for row_ids, row_values, rank, k in zip(
            ids.tolist(), values.tolist(), ranks.tolist(), num_logprobs, strict=True
        )
    ]
