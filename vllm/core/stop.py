"""When a sequence ends, as far as token ids tell (stop strings are the caller's)."""

from __future__ import annotations

from vllm.sequence import Sequence
from vllm.types import FinishReason

Stop = tuple[FinishReason, int | None]
"""(finish reason, stop reason)."""


def check_stop(sequence: Sequence, token_id: int) -> Stop | None:
    """Return how a sequence ends with its newest token, or None if it goes on.

    Before min_tokens outputs neither EOS nor a stop id ends it. A stop id is its own stop reason,
    EOS has none.
    """
    state = sequence.state
    num_tokens = len(sequence.token_ids)
    if num_tokens - sequence.num_prompt_tokens >= sequence.sampling.min_tokens:
        if token_id == state.request.eos_token_id:
            return (FinishReason.STOP, None)
        if token_id in state.stop_token_ids:
            return (FinishReason.STOP, token_id)
    if num_tokens >= sequence.max_len:
        return (FinishReason.LENGTH, None)
    return None
