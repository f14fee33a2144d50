"""Caches of states for kernel tests: strided, with gaps, NaN where nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.utils.ops import random_rows
from tests.utils.paged import cumulative

UNIT_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class StateRows:
    """The rows of a step and the states of one cache field.

    Attributes:
        view: [units, *shape], stride(0) of 256 bytes; NaN but in the states of continued rows.
        offsets, cu_query_lens, num_computed, seq_lens: as the ops take them.
    """

    view: Tensor
    offsets: Tensor
    cu_query_lens: Tensor
    num_computed: Tensor
    seq_lens: Tensor

    @property
    def before(self) -> tuple[Tensor, Tensor, Tensor]:
        """What an op takes that counts tokens before the step."""
        return self.offsets, self.cu_query_lens, self.num_computed

    @property
    def after(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a step op takes."""
        return self.offsets, self.cu_query_lens, self.seq_lens

    @property
    def memory(self) -> Tensor:
        """All bytes: gaps and neighbours must stay as they were."""
        return all_bytes(self.view)


def make_state_rows(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    lengths: list[int],
    computed: list[int],
    device: str,
) -> StateRows:
    """Make one block a row, in random order and with a gap between blocks.

    Args:
        computed: tokens before the step; a row that begins holds NaN, one of -1 is padding.
    """
    num_rows = len(lengths)
    size = torch.Size(shape).numel() * dtype.itemsize
    block_units = -(-(size + 64) // UNIT_BYTES)
    length = (num_rows + 1) * block_units * UNIT_BYTES // dtype.itemsize
    arena = torch.full((length,), float("nan"), dtype=dtype, device=device)
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    unit = UNIT_BYTES // dtype.itemsize
    view = arena.as_strided(
        (num_rows * block_units, *shape), (unit, *strides), 64 // dtype.itemsize
    )
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(3))
    for row, done in enumerate(computed):
        if done > 0:
            view[int(order[row]) * block_units] = random_rows(*shape, dtype=dtype, seed=row)
    done = torch.tensor(computed, dtype=torch.int32)
    return StateRows(
        view=view,
        offsets=(order * block_units).int().to(device),
        cu_query_lens=cumulative(lengths).to(device),
        num_computed=done.to(device),
        seq_lens=(done + torch.tensor(lengths, dtype=torch.int32)).to(device),
    )


def make_conv_state(rows: StateRows, channels: int, taps: int, dtype: torch.dtype) -> Tensor:
    """Make the inputs that a convolution remembers, in memory of their own at the rows' offsets.

    Returns:
        [units, C, K - 1], as the ops take it; NaN but in the states of continued rows, which hold
        numbers of bfloat16 whatever the dtype.
    """
    size, unit = (taps - 1) * channels, UNIT_BYTES // dtype.itemsize
    num_units = rows.view.shape[0]
    flat = torch.full((num_units * unit + size,), float("nan"), dtype=dtype)
    view = flat.as_strided((num_units, taps - 1, channels), (unit, channels, 1))
    for row, done in enumerate(rows.num_computed.tolist()):
        if done > 0:
            state = random_rows(taps - 1, channels, dtype=torch.bfloat16, seed=100 + row)
            view[int(rows.offsets[row])] = state.to(dtype)
    moved = flat.to(rows.view.device)
    return moved.as_strided(view.shape, view.stride()).transpose(1, 2)


def all_bytes(state: Tensor) -> Tensor:
    """Return the memory of a state, whose units overlap."""
    return state.as_strided((state.untyped_storage().nbytes() // state.dtype.itemsize,), (1,), 0)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare on the scale of twice the root mean square; NaN must be in the same places."""
    known = expected[~expected.isnan()].float()
    scale = 2 * known.square().mean().sqrt().item() if known.numel() else 1.0
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=tolerance, atol=tolerance * scale, equal_nan=True
    )
