"""Doors of the sampling ops; the compiled op checks its arguments, nothing here computes.

Called by `model_executor/layers/sampler.py`, in the order penalties, mask, sample, logprobs. Naive
twins: `_custom_ops/naive/sampling.py`. Every op reads NaN as -inf and +inf as the largest float32,
and what it does to a row depends on that row alone, bit for bit, on any number of threads.
"""

from __future__ import annotations

from torch import Tensor

from vllm._custom_ops.library import C


def argmax(out_ids: Tensor, logits: Tensor) -> None:
    """Write the id of the largest logit of each row, the lowest id where several are equal.

    Args:
        out_ids: int64 [S].
        logits: float32, on CUDA also bfloat16 or float16; [S, V], rows at any stride.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.argmax(out_ids, logits)


def sample(
    out_ids: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    offsets: Tensor,
) -> None:
    """Draw one token a row: temperature, top-k, top-p over what is left, min-p, softmax, draw.

    The draw is the inverse CDF over the kept tokens in order of their ids, at the one uniform
    number that belongs to (seed, offset). No row is sorted as a whole.

    Args:
        out_ids: int64 [S].
        logits: float32 [S, V], rows at any stride; not changed.
        temperature: float32 [S]; a row below 1e-5 takes the most likely token, filters unread.
        top_p: float32 [S]; the smallest set that reaches it is kept, at least one token; 1 = off.
        top_k: int32 [S]; exactly that many are kept, ties go to the lower id; 0 or less = off.
        min_p: float32 [S]; tokens below min_p times the highest probability go; 0 = off.
        seeds: int64 [S], key of the row's random stream (all 64 bits count).
        offsets: int64 [S], place in that stream (all 64 bits count).

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.sample(out_ids, logits, temperature, top_p, top_k, min_p, seeds, offsets)


def keep_possible(out_ids: Tensor, ids: Tensor, logits: Tensor) -> None:
    """Write the id chosen for each row, -1 where its logit is -inf or NaN; CUDA tensors only.

    Args:
        out_ids: int64 [S].
        ids: int64 [S], in [0, V).
        logits: as in `argmax`.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.keep_possible(out_ids, ids, logits)


def filter_logits(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor
) -> None:
    """Divide by the temperature and set what `sample` would never draw to -inf, in place.

    For rows whose logprobs are asked for: log-softmax of the result is what `sample` drew from. A
    row whose temperature is below 1e-5 is left as it is.

    Args:
        logits: float32 [S, V], rows at any stride.
        temperature: as in `sample`.
        top_p: as in `sample`.
        top_k: as in `sample`.
        min_p: as in `sample`.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.filter_logits(logits, temperature, top_p, top_k, min_p)


def apply_penalties(
    logits: Tensor,
    cu_tokens: Tensor,
    token_ids: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Apply repetition, then frequency, then presence penalties in place.

    Args:
        logits: float32 [S, V], rows at any stride.
        cu_tokens: int64 [S + 1]; row s owns entries cu_tokens[s] to cu_tokens[s + 1] of the next
            two arguments.
        token_ids: int64 [N], the distinct tokens of a row's prompt and output, in any order.
        output_counts: int32 [N], how often each occurs in the output (0: in the prompt only).
        repetition: float32 [S]; positive logits are divided by it, others multiplied; 1 = off.
        frequency: float32 [S]; subtracted once for each occurrence in the output; 0 = off.
        presence: float32 [S]; subtracted once if the token occurs in the output; 0 = off.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.apply_penalties(logits, cu_tokens, token_ids, output_counts, repetition, frequency, presence)


def apply_token_bitmask(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to -inf, in place.

    Args:
        logits: float32 [S, V], rows at any stride.
        rows: int64 [M], distinct rows of `logits` under a grammar.
        bitmask: int32 [M, W]; token t is bit t % 32 of word t // 32; tokens beyond W * 32 are not
            allowed.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.apply_token_bitmask(logits, rows, bitmask)


def topk_logprobs(
    out_logprobs: Tensor, out_ids: Tensor, out_ranks: Tensor, logits: Tensor, chosen_ids: Tensor
) -> None:
    """Write log-softmax values of the chosen token and of the k most likely ones.

    Args:
        out_logprobs: float32 [S, 1 + k]; the chosen token first, then falling.
        out_ids: int64 [S, 1 + k], the ids they belong to; equal logits in order of their ids.
        out_ranks: int64 [S], 1 + number of tokens strictly more likely than the chosen one.
        logits: float32 [S, V], rows at any stride; k is at most V. Not changed.
        chosen_ids: int64 [S], each in 0..V-1.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.topk_logprobs(out_logprobs, out_ids, out_ranks, logits, chosen_ids)
