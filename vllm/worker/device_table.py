"""The block tables of one KV cache group on the GPU, kept equal to those on the host.

`gpu_input_batch.py` owns one for each group. The host's table stays the truth; what changes in a
step is written into the device's copy by one scatter before the step's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vllm.batch import GroupBatch
from vllm.worker.block_table import BlockTable, GroupGeometry, Int64Array


class DeviceBlockTable(BlockTable):
    """A block table with a copy on the device.

    Attributes:
        offsets_device: int32 [rows + 1, max_blocks]; the last row holds nothing but pad blocks.
    """

    def __init__(
        self, geometry: GroupGeometry, num_rows: int, max_tokens: int, device: torch.device
    ) -> None:
        super().__init__(geometry, num_rows, max_tokens)
        self._places: list[Int64Array] = []
        self._values: list[Int64Array] = []
        self.offsets_device = self._make_device_pad(num_rows + 1, device)

    def grow(self, num_rows: int) -> None:
        """See BlockTable; captured graphs hold the device's copy, so it cannot move."""
        raise AssertionError(f"a step of {num_rows} rows is beyond max_num_seqs")

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """See BlockTable."""
        start = self._num_blocks[row]
        super().append(row, block_ids)
        stop = start + len(block_ids)
        first = row * self.offsets_device.shape[1]
        self._places.append(np.arange(first + start, first + stop, dtype=np.int64))
        self._values.append(self._offsets[row, start:stop].astype(np.int64))

    def take_changes(self) -> tuple[Int64Array, Int64Array] | None:
        """Return (flat indices into `offsets_device`, values) since the last call, or None."""
        if not self._places:
            return None
        changes = np.concatenate(self._places), np.concatenate(self._values)
        self._places, self._values = [], []
        return changes

    def apply_changes(self, places: Tensor, values: Tensor) -> None:
        """Write changes into the device's copy, in stream order.

        Args:
            places: int64 [N] on the device; of equal ones the last written stands undefined, so
                that callers pass each entry once.
            values: int64 [N] on the device.
        """
        self.offsets_device.view(-1).index_copy_(0, places, values.to(torch.int32))

    def gather_device(
        self, rows: Tensor, places: Tensor, positions: Tensor, max_tokens: int
    ) -> GroupBatch:
        """Return where the rows and the new tokens of a step lie.

        Args:
            rows: int64 [B], the batch's rows in the table.
            places: int64 [T], the row of each new token.
            positions: int64 [T], its position.
            max_tokens: of the longest row.
        """
        table, geometry = self.offsets_device, self.geometry
        width = self.count_blocks(max_tokens)
        if geometry.is_per_sequence:
            slots = torch.empty(0, 2, dtype=torch.int32, device=table.device)
        else:
            blocks = table[places, positions // geometry.block_tokens]
            blocks = torch.where(blocks == geometry.pad_offset, -1, blocks)
            inside = (positions % geometry.block_tokens).to(torch.int32)
            slots = torch.stack((blocks, inside), 1)
        return GroupBatch(
            block_offsets=table[:, :width].index_select(0, rows),
            slots=slots,
            block_tokens=geometry.block_tokens,
        )

    def _make_device_pad(self, num_rows: int, device: torch.device) -> Tensor:
        shape = (num_rows, self._max_blocks)
        return torch.full(shape, self.geometry.pad_offset, dtype=torch.int32, device=device)
