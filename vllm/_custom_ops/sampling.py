"""Doors of the sampling ops: check the arguments, then run the compiled kernel.

Called by `model_executor/layers/sampler.py`, in the order penalties, mask, sample, logprobs. Naive
twins: `_custom_ops/naive/sampling.py`. Every op reads NaN as -inf and +inf as the largest float32,
and what it does to a row depends on that row alone, bit for bit, on any number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm._custom_ops.checks import check_contiguous, check_rows, check_tensor
from vllm._custom_ops.library import ops
from vllm.errors import ShapeError

_F32 = (torch.float32,)
_I32 = (torch.int32,)
_I64 = (torch.int64,)


def _check_logits(op: str, logits: Tensor) -> int:
    check_tensor(op, "logits", logits, _F32, (None, None))
    check_rows(op, "logits", logits)
    if logits.shape[1] == 0:
        raise ShapeError(f"{op}: logits must have at least one column, got {tuple(logits.shape)}")
    return logits.shape[0]


def _check_vector(
    op: str, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], size: int
) -> None:
    check_tensor(op, name, tensor, dtypes, (size,))
    check_contiguous(op, name, tensor)


def _check_filters(
    op: str, size: int, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor
) -> None:
    _check_vector(op, "temperature", temperature, _F32, size)
    _check_vector(op, "top_p", top_p, _F32, size)
    _check_vector(op, "top_k", top_k, _I32, size)
    _check_vector(op, "min_p", min_p, _F32, size)


def argmax(out_ids: Tensor, logits: Tensor) -> None:
    """Write the id of the largest logit of each row, the lowest id where several are equal.

    Args:
        out_ids: int64 [S].
        logits: float32 [S, V], rows at any stride.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    size = _check_logits("argmax", logits)
    _check_vector("argmax", "out_ids", out_ids, _I64, size)
    ops().argmax(out_ids, logits)


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

    The draw is the inverse CDF over the kept tokens in order of their ids, at the one uniform number
    that belongs to (seed, offset). No row is sorted as a whole.

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
    size = _check_logits("sample", logits)
    _check_vector("sample", "out_ids", out_ids, _I64, size)
    _check_filters("sample", size, temperature, top_p, top_k, min_p)
    _check_vector("sample", "seeds", seeds, _I64, size)
    _check_vector("sample", "offsets", offsets, _I64, size)
    ops().sample(out_ids, logits, temperature, top_p, top_k, min_p, seeds, offsets)


def filter_logits(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor
) -> None:
    """Divide by the temperature and set what `sample` would never draw to -inf, in place.

    For rows whose logprobs are asked for: log-softmax of the result is what `sample` drew from. A row
    whose temperature is below 1e-5 is left as it is.

    Args:
        logits: float32 [S, V], rows at any stride.
        temperature: as in `sample`, like the other filters.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    size = _check_logits("filter_logits", logits)
    _check_filters("filter_logits", size, temperature, top_p, top_k, min_p)
    ops().filter_logits(logits, temperature, top_p, top_k, min_p)


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
        cu_tokens: int64 [S + 1]; row s owns entries cu_tokens[s] to cu_tokens[s + 1] of the next two.
        token_ids: int64 [N], the distinct tokens of a row's prompt and output, in any order.
        output_counts: int32 [N], how often each occurs in the output (0: in the prompt only).
        repetition: float32 [S]; positive logits are divided by it, others multiplied; 1 = off.
        frequency: float32 [S]; subtracted once for each occurrence in the output; 0 = off.
        presence: float32 [S]; subtracted once if the token occurs in the output; 0 = off.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
        RuntimeError: a token id or an entry of cu_tokens lies outside (nothing is changed then).
    """
    op = "apply_penalties"
    size = _check_logits(op, logits)
    _check_vector(op, "cu_tokens", cu_tokens, _I64, size + 1)
    check_tensor(op, "token_ids", token_ids, _I64, (None,))
    check_contiguous(op, "token_ids", token_ids)
    _check_vector(op, "output_counts", output_counts, _I32, token_ids.shape[0])
    _check_vector(op, "repetition", repetition, _F32, size)
    _check_vector(op, "frequency", frequency, _F32, size)
    _check_vector(op, "presence", presence, _F32, size)
    ops().apply_penalties(
        logits, cu_tokens, token_ids, output_counts, repetition, frequency, presence
    )


def apply_token_bitmask(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to -inf, in place.

    Args:
        logits: float32 [S, V], rows at any stride.
        rows: int64 [M], distinct rows of `logits` under a grammar.
        bitmask: int32 [M, W]; token t is bit t % 32 of word t // 32; tokens beyond W * 32 are not
            allowed.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
        RuntimeError: a row lies outside (nothing is changed then).
    """
    op = "apply_token_bitmask"
    _check_logits(op, logits)
    check_tensor(op, "rows", rows, _I64, (None,))
    check_contiguous(op, "rows", rows)
    check_tensor(op, "bitmask", bitmask, _I32, (rows.shape[0], None))
    check_contiguous(op, "bitmask", bitmask)
    ops().apply_token_bitmask(logits, rows, bitmask)


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
        RuntimeError: a chosen id lies outside (nothing is written then).
    """
    op = "topk_logprobs"
    size = _check_logits(op, logits)
    check_tensor(op, "out_ids", out_ids, _I64, (size, None))
    check_contiguous(op, "out_ids", out_ids)
    width = out_ids.shape[1]
    if not 1 <= width <= logits.shape[1] + 1:
        raise ShapeError(f"{op}: k must lie in 0..{logits.shape[1]}, got {width - 1}")
    check_tensor(op, "out_logprobs", out_logprobs, _F32, (size, width))
    check_contiguous(op, "out_logprobs", out_logprobs)
    _check_vector(op, "out_ranks", out_ranks, _I64, size)
    _check_vector(op, "chosen_ids", chosen_ids, _I64, size)
    ops().topk_logprobs(out_logprobs, out_ids, out_ranks, logits, chosen_ids)
