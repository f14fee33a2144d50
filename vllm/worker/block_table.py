"""The block tables of one KV cache group, kept as offsets into this rank's arena.

`InputBatch` owns one for each group. Turns the scheduler's block ids into offsets in units of 256
bytes; knows nothing of layers, tokens' values or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm.cache_spec import BLOCK_ALIGNMENT_BYTES

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

MAX_ARENA_UNITS = 2**31  # offsets are int32
_FIRST_WIDTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGeometry:
    """Where the blocks of a group lie on this rank, in units of 256 bytes.

    Attributes:
        pad_offset: offset of the group's pad block, which belongs to no sequence.
        is_per_sequence: a block is the state of one sequence and holds no rows of tokens.
    """

    block_tokens: int
    blocks_per_superblock: int
    superblock_units: int
    block_units: int
    pad_offset: int
    is_per_sequence: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on this rank."""
        return self.block_units * BLOCK_ALIGNMENT_BYTES

    def get_offset(self, block_id: int) -> int:
        """Return the offset of one block; a negative id is the pad block."""
        if block_id < 0:
            return self.pad_offset
        superblock, slot = divmod(block_id, self.blocks_per_superblock)
        return superblock * self.superblock_units + slot * self.block_units

    def get_offsets(self, block_ids: Sequence[int]) -> Int32Array:
        """Return the offsets of many blocks, int32 [N]."""
        if len(block_ids) <= 4:  # decode rows get one now and then: cheaper than three array ops
            return np.array([self.get_offset(b) for b in block_ids], dtype=np.int32)
        ids: Int64Array = np.array(block_ids, dtype=np.int64)
        superblocks, slots = np.divmod(ids, self.blocks_per_superblock)
        offsets = superblocks * self.superblock_units + slots * self.block_units
        return np.where(ids < 0, self.pad_offset, offsets).astype(np.int32)


class BlockTable:
    """Offsets of the blocks of every row of the batch, int32 [rows, blocks]."""

    def __init__(self, geometry: GroupGeometry, num_rows: int, max_tokens: int) -> None:
        self.geometry = geometry
        self._max_blocks = self.count_blocks(max_tokens) + 1
        self._num_blocks = [0] * num_rows
        self._has_gaps = False
        self._offsets = self._make_pad(num_rows, min(_FIRST_WIDTH, self._max_blocks))

    def grow(self, num_rows: int) -> None:
        """Make room for `num_rows` rows; what is there stays."""
        added = num_rows - len(self._num_blocks)
        pad = self._make_pad(added, self._offsets.shape[1])
        self._offsets = np.concatenate((self._offsets, pad))
        self._num_blocks.extend([0] * added)

    def set_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Replace the whole table of a row."""
        used = self._num_blocks[row]
        self._offsets[row, :used] = self.geometry.pad_offset
        self._num_blocks[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks at the end of a row's table."""
        start = self._num_blocks[row]
        stop = start + len(block_ids)
        self._has_gaps = self._has_gaps or any(block_id < 0 for block_id in block_ids)
        assert stop <= self._max_blocks, f"{stop} blocks in a table of {self._max_blocks}"
        width = self._offsets.shape[1]
        if stop > width:  # tables are as wide as the longest sequence so far, not as max_model_len
            added = min(max(stop, 2 * width), self._max_blocks) - width
            pad = self._make_pad(len(self._num_blocks), added)
            self._offsets = np.concatenate((self._offsets, pad), axis=1)
        if stop == start + 1:
            self._offsets[row, start] = self.geometry.get_offset(block_ids[0])
        else:
            self._offsets[row, start:stop] = self.geometry.get_offsets(block_ids)
        self._num_blocks[row] = stop

    def count_blocks(self, num_tokens: int) -> int:
        """Return how many entries `num_tokens` tokens take; 1 for a state."""
        if self.geometry.is_per_sequence:
            return 1
        return -(-num_tokens // self.geometry.block_tokens)

    def _make_pad(self, num_rows: int, num_blocks: int) -> Int32Array:
        return np.full((num_rows, num_blocks), self.geometry.pad_offset, dtype=np.int32)

    def gather(self, rows: Int64Array, max_tokens: int) -> Int32Array:
        """Return the tables of `rows`, wide enough for `max_tokens` tokens: int32 [B, blocks]."""
        return self._offsets[rows, : self.count_blocks(max_tokens)]

    def get_slots(self, rows: Int64Array, positions: Int64Array) -> Int32Array:
        """Return (offset of the block, row inside it) of each token: int32 [T, 2].

        The offset of a token that has no block is -1: its row is not stored. A group of states has
        no rows at all: [0, 2].

        Args:
            rows: the row of each token, [T].
            positions: its position in the sequence, [T].
        """
        if self.geometry.is_per_sequence:
            return np.empty((0, 2), dtype=np.int32)
        blocks, inside = np.divmod(positions, self.geometry.block_tokens)
        slots = np.empty((len(positions), 2), dtype=np.int32)
        slots[:, 0] = self._offsets[rows, blocks]
        slots[:, 1] = inside
        if self._has_gaps:
            slots[slots[:, 0] == self.geometry.pad_offset, 0] = -1
        return slots
