"""Doors of the ops that turn the rows of a decode step into its tensors, on a GPU.

Called by `worker/gpu_input_batch.py`, inside CUDA graphs too: they read what the step's rows are
from memory, so that one captured graph serves every batch of its size. Naive twins:
`_custom_ops/naive/batch.py`.
"""

from __future__ import annotations

from torch import Tensor

from vllm._custom_ops.library import C


def prepare_decode_tokens(
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    row_indices: Tensor,
    computed_lens: Tensor,
    token_ids: Tensor,
    last_tokens: Tensor,
) -> None:
    """Write ids, positions and lengths of one new token a row.

    Args:
        input_ids: int64 [B], written: the row's id, or what `last_tokens` holds for it.
        positions: int64 [B], written.
        seq_lens: int32 [B], written: computed and new tokens, 0 for a row of padding.
        row_indices: int64 [B], the row's place in the persistent arrays; negative is padding.
        computed_lens: int64 [B], tokens before the step.
        token_ids: int64 [B], the new token; negative where only the device knows it yet.
        last_tokens: int64 [rows], the newest token of every persistent row.
    """
    C.prepare_decode_tokens(
        input_ids, positions, seq_lens, row_indices, computed_lens, token_ids, last_tokens
    )


def prepare_decode_group(
    block_offsets: Tensor,
    slots: Tensor,
    row_indices: Tensor,
    positions: Tensor,
    table: Tensor,
    block_tokens: int,
    pad_offset: int,
) -> None:
    """Write the block tables and slots of one KV cache group for one new token a row.

    Args:
        block_offsets: int32 [B, N], written: the first N entries of each row's table, the pad block
            for rows of padding.
        slots: int32 [B, 2], written, or [0, 2] for a group of states: offset -1 where a token has
            no block.
        row_indices: int64 [B], as above.
        positions: int64 [B], position of the new token.
        table: int32 [rows, at least N], offsets of the blocks of every persistent row.
        block_tokens: tokens of a block.
        pad_offset: offset of the group's pad block.
    """
    C.prepare_decode_group(
        block_offsets, slots, row_indices, positions, table, block_tokens, pad_offset
    )
