"""What the ops of `_custom_ops/batch.py` mean, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def prepare_decode_tokens(
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    row_indices: Tensor,
    computed_lens: Tensor,
    token_ids: Tensor,
    last_tokens: Tensor,
) -> None:
    """Choose by row whether the host or the device knows the token."""
    is_row = row_indices >= 0
    known = torch.where(token_ids >= 0, token_ids, last_tokens[row_indices.clamp(min=0)])
    input_ids.copy_(torch.where(is_row, known, 0))
    positions.copy_(torch.where(is_row, computed_lens, 0))
    seq_lens.copy_(torch.where(is_row, computed_lens + 1, 0))


def prepare_decode_group(
    block_offsets: Tensor,
    slots: Tensor,
    row_indices: Tensor,
    positions: Tensor,
    table: Tensor,
    block_tokens: int,
    pad_offset: int,
) -> None:
    """Gather the tables of the rows, then look up where each new token goes."""
    is_row = row_indices >= 0
    rows = table[row_indices.clamp(min=0)]
    width = block_offsets.shape[1]
    block_offsets.copy_(torch.where(is_row[:, None], rows[:, :width], pad_offset))
    if slots.shape[0] == 0:
        return
    blocks = rows.gather(1, (positions // block_tokens)[:, None])[:, 0]
    is_stored = is_row & (blocks != pad_offset)
    slots[:, 0] = torch.where(is_stored, blocks, -1)
    slots[:, 1] = positions % block_tokens
