"""Triton twins of `_custom_ops/batch.py`: what a decode step needs, made on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm.utils.math import cdiv

_WIDTH = 1024  # table entries that one program copies


@fast_launch
@triton.jit
def _tokens_kernel(
    input_ids,
    positions,
    seq_lens,
    row_indices,
    computed_lens,
    token_ids,
    last_tokens,
    num_rows,
    stride,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = row < num_rows
    index = tl.load(row_indices + row * stride, mask=is_in, other=-1)
    is_row = index >= 0
    computed = tl.load(computed_lens + row * stride, mask=is_row, other=0)
    token = tl.load(token_ids + row * stride, mask=is_row, other=0)
    newest = tl.load(last_tokens + index, mask=is_row & (token < 0), other=0)
    tl.store(input_ids + row, tl.where(token < 0, newest, token), mask=is_in)
    tl.store(positions + row, computed, mask=is_in)
    tl.store(seq_lens + row, tl.where(is_row, computed + 1, 0).to(tl.int32), mask=is_in)


@fast_launch
@triton.jit(do_not_specialize=["pad_offset"])
def _group_kernel(
    block_offsets,
    slots,
    row_indices,
    positions,
    table,
    row_stride,
    table_stride,
    offsets_stride,
    num_blocks,
    block_tokens,
    pad_offset,
    HAS_SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    index = tl.load(row_indices + row * row_stride)
    is_row = index >= 0
    source = table + tl.where(is_row, index, 0) * table_stride
    is_in = column < num_blocks
    entries = tl.load(source + column, mask=is_in & is_row, other=0)
    entries = tl.where(is_row, entries, pad_offset)
    tl.store(block_offsets + row * offsets_stride + column, entries, mask=is_in)
    if HAS_SLOTS and tl.program_id(1) == 0:
        position = tl.load(positions + row)
        block = tl.load(source + position // block_tokens)
        is_stored = is_row & (block != pad_offset)
        tl.store(slots + 2 * row, tl.where(is_stored, block, -1))
        tl.store(slots + 2 * row + 1, (position % block_tokens).to(tl.int32))


def prepare_decode_tokens(
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    row_indices: Tensor,
    computed_lens: Tensor,
    token_ids: Tensor,
    last_tokens: Tensor,
) -> None:
    """See the door; what the host sends of a row are columns of one array."""
    assert row_indices.stride(0) == computed_lens.stride(0) == token_ids.stride(0)
    num_rows = row_indices.shape[0]
    block = 128
    is_overlapped = overlaps(row_indices.device)
    _tokens_kernel[(cdiv(num_rows, block),)](
        input_ids,
        positions,
        seq_lens,
        row_indices,
        computed_lens,
        token_ids,
        last_tokens,
        num_rows,
        row_indices.stride(0),
        BLOCK=block,
        OVERLAPS=is_overlapped,
        launch_pdl=is_overlapped,
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
    """See the door."""
    num_rows, num_blocks = block_offsets.shape
    is_overlapped = overlaps(row_indices.device)
    _group_kernel[(num_rows, cdiv(num_blocks, _WIDTH))](
        block_offsets,
        slots,
        row_indices,
        positions,
        table,
        row_indices.stride(0),
        table.stride(0),
        block_offsets.stride(0),
        num_blocks,
        block_tokens,
        pad_offset,
        HAS_SLOTS=slots.shape[0] > 0,
        WIDTH=_WIDTH,
        OVERLAPS=is_overlapped,
        launch_pdl=is_overlapped,
    )


OPS = {
    "prepare_decode_tokens": prepare_decode_tokens,
    "prepare_decode_group": prepare_decode_group,
}
SCHEMAS = {
    "prepare_decode_tokens": (
        "prepare_decode_tokens(Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) seq_lens, "
        "Tensor row_indices, Tensor computed_lens, Tensor token_ids, Tensor last_tokens) -> ()"
    ),
    "prepare_decode_group": (
        "prepare_decode_group(Tensor(a!) block_offsets, Tensor(b!) slots, Tensor row_indices, "
        "Tensor positions, Tensor table, int block_tokens, int pad_offset) -> ()"
    ),
}
