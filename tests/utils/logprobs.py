"""Log-probabilities launched and read at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vllm.model_executor.layers.token_logprobs import launch_logprobs, read_logprobs
from vllm.model_executor.layers.transfer import Download
from vllm.step import TokenLogprobs


def compute_logprobs(
    logits_SV: Tensor, chosen_ids: Tensor, num_logprobs: Sequence[int]
) -> list[TokenLogprobs]:
    """Return one entry a row; arguments as in `launch_logprobs`."""
    values, ids, ranks = Download(launch_logprobs(logits_SV, chosen_ids, num_logprobs)).wait()
    return read_logprobs(values, ids, ranks, num_logprobs)
