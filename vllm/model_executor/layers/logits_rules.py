"""Changes to logits that one request asks for, before penalties and temperature.

Called by the sampler for the few rows that have any. Works on views of single rows; a fault of a
user's processor is returned as that row's error and never raised.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vllm._custom_ops.sampling import apply_token_bitmask
from vllm.model_executor.layers.sampling_state import SamplingState
from vllm.model_executor.layers.transfer import upload

_NEVER = float("-inf")


def apply_processors(logits_V: Tensor, state: SamplingState) -> str | None:
    """Run the user's processors on one row, in place; returns what went wrong, or None."""
    for processor in state.processors:
        try:
            result = processor(list(state.prompt_ids), list(state.output_ids), logits_V)
        except Exception as exc:  # a user's code may raise anything
            return f"a logits processor raised {type(exc).__name__}: {exc}"
        if not isinstance(result, Tensor) or result.shape != logits_V.shape:
            given = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            return (
                f"a logits processor must return a tensor of shape {tuple(logits_V.shape)}, "
                f"returned {given}"
            )
        if result is not logits_V:
            logits_V.copy_(result)
    return None


def apply_bitmasks(logits_SV: Tensor, masks: Sequence[tuple[int, bytes]]) -> None:
    """Forbid what grammars forbid, in place.

    Args:
        logits_SV: float32 [S, V].
        masks: (row, packed bitmask): int32 words, token t is bit t % 32 of word t // 32.
    """
    if not masks:
        return
    width = max(len(mask) for _, mask in masks) // 4
    words = np.zeros((len(masks), width), dtype=np.int32)
    for i, (_, mask) in enumerate(masks):
        packed = np.frombuffer(mask, dtype=np.int32)
        words[i, : len(packed)] = packed
    rows = np.array([row for row, _ in masks], dtype=np.int64)
    apply_token_bitmask(logits_SV, *upload([rows, words], logits_SV.device))


def apply_rules(logits_V: Tensor, state: SamplingState, num_outputs: int) -> str | None:
    """Apply logit_bias, allowed_token_ids, bad words and min_tokens to one row, in place.

    Args:
        logits_V: float32 [V].
        state: the row's; ids go to the device once, bans again only when they change.
        num_outputs: tokens generated before this one.

    Returns:
        What is wrong with the request, or None. Ids are checked when a request enters the engine;
        one that is outside all the same must not take the neighbours down with it.
    """
    vocab = logits_V.shape[0]
    for name, ids in (("logit_bias", state.bias_ids), ("allowed_token_ids", state.allowed_ids)):
        if ids is not None and (outside := ids[(ids < 0) | (ids >= vocab)]).size:
            return f"{name} has token ids {outside.tolist()} outside 0..{vocab - 1}"
    tensors = state.tensors
    if state.bias_ids is not None and state.bias_values is not None:
        if "bias" not in tensors:
            tensors["bias"] = upload([state.bias_ids, state.bias_values], logits_V.device)
        logits_V.index_add_(0, *tensors["bias"])
    if state.allowed_ids is not None:
        if "allowed" not in tensors:
            tensors["allowed"] = upload([state.allowed_ids], logits_V.device)
        [allowed_ids] = tensors["allowed"]
        kept = logits_V[allowed_ids]
        logits_V.fill_(_NEVER)
        logits_V.index_copy_(0, allowed_ids, kept)
    banned = _find_bad_words(state.params.bad_words_token_ids, state.output_ids)
    if num_outputs < state.params.min_tokens:
        banned.extend(state.params.stop_token_ids)
    if banned:
        if banned != state.banned:
            inside = [token for token in banned if 0 <= token < vocab]
            tensors["banned"] = upload([np.array(inside, dtype=np.int64)], logits_V.device)
            state.banned = banned
        [banned_ids] = tensors["banned"]
        logits_V.index_fill_(0, banned_ids, _NEVER)
    return None


def _find_bad_words(bad_words: Sequence[Sequence[int]], output_ids: Sequence[int]) -> list[int]:
    """Return the tokens that would complete a bad word right now.

    Only what was generated counts: a prompt that ends in the first half of a bad word bans nothing.
    """
    banned = []
    for word in bad_words:
        *head, last = word
        if not head or list(output_ids[-len(head) :]) == head:
            banned.append(last)
    return banned
