"""How the rows of a step with cached tokens are served: few new tokens, or many.

Called by `backends/triton.py` once a step, with lengths that the host knows; nothing waits for the
device. A row with few new tokens is split over its keys as decode rows are. What a row with many
sees is laid behind each other first.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from vllm._custom_ops.triton.attention_args import ChunkRows, JoinedRows
from vllm._custom_ops.triton.attention_shape import PREFIX_ALIGNMENT
from vllm.batch import ForwardBatch

MAX_CHUNK_TOKENS = 128
MIN_CHUNK_COMPUTED = 512
"""Cached tokens of one of the rows; with fewer, one program a head is fast enough."""

MIN_JOINED_TOKENS = 512
"""New tokens of one of the rows; fewer read each key too seldom to pay a copy."""

MAX_JOINED_BYTES = 1 << 30


def plan_chunks(batch: ForwardBatch) -> ChunkRows | None:
    """Return the rows with few new tokens, or None if no row has them at a long end.

    In a padded step, of whose rows the host says nothing, all of them may be at one.
    """
    first, new, computed = batch.num_decode_rows, batch.new_lens_cpu, batch.computed_lens_cpu
    if batch.has_spare_tokens and batch.max_query_len <= MAX_CHUNK_TOKENS:
        device, num_rows = batch.seq_lens.device, batch.seq_lens.shape[0]
        return ChunkRows(
            rows=torch.arange(first, num_rows, dtype=torch.int32, device=device),
            most_tokens=MAX_CHUNK_TOKENS,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            are_all=True,
        )
    rows = [i for i in range(first, len(new)) if new[i] <= MAX_CHUNK_TOKENS]
    if max((computed[i] for i in rows), default=0) < MIN_CHUNK_COMPUTED:
        return None
    return ChunkRows(
        rows=send_lens(rows, batch.seq_lens.device),
        most_tokens=MAX_CHUNK_TOKENS,
        max_query_len=max(new[i] for i in rows),
        max_seq_len=max(new[i] + computed[i] for i in rows),
        are_all=len(rows) == len(new) - first,
    )


def plan_joined(
    batch: ForwardBatch,
    window: int,
    row_bytes: int,
    chunks: ChunkRows | None,
    *,
    has_new: bool = True,
) -> JoinedRows | None:
    """Return how many rows of K and V each row sees, or None where they are not worth a copy.

    Args:
        batch: the step.
        window: tokens that stay visible; 0 is all.
        row_bytes: of K and V of one token.
        chunks: rows that need none.
        has_new: see JoinedRows.
    """
    least = 0 if chunks is None else chunks.most_tokens
    lens, is_worth_it = [0] * batch.num_decode_rows, False
    for new, computed in list(zip(batch.new_lens_cpu, batch.computed_lens_cpu, strict=True))[
        batch.num_decode_rows :
    ]:
        kept = min(computed, window - 1) if window else computed
        joined = new if has_new else min(new, -computed % PREFIX_ALIGNMENT)
        lens.append(kept + joined if new > least else 0)
        is_worth_it |= new >= MIN_JOINED_TOKENS and computed > 0
    num_keys = sum(lens)
    if not is_worth_it or not 0 < num_keys * row_bytes <= MAX_JOINED_BYTES:
        return None
    return JoinedRows(
        cu_key_lens=send_lens([0, *accumulate(lens)], batch.seq_lens.device),
        num_keys=num_keys,
        max_key_len=max(lens),
        has_new=has_new,
    )


def send_lens(values: list[int], device: torch.device) -> Tensor:
    """Return int32 values on a device, without waiting for it."""
    is_pinned = device.type == "cuda"
    return torch.tensor(values, dtype=torch.int32, pin_memory=is_pinned).to(
        device, non_blocking=True
    )
