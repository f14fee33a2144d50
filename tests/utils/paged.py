"""A paged cache and a step over it, as the attention tests build them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNIT_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCache:
    """Cache views of one layer in an arena full of NaN, and the blocks of each row.

    Attributes:
        key, value: [num_units, block_tokens, Hkv, D], stride(0) = 256 bytes.
        block_offsets: int32 [B, max_blocks]; blocks of all rows interleaved, in random order.
    """

    key: Tensor
    value: Tensor
    block_offsets: Tensor

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.key.shape[1]

    def slots(self, row: int, begin: int, end: int) -> Tensor:
        """Return the slots of positions begin … end - 1 of a row, int32 [end - begin, 2]."""
        positions = torch.arange(begin, end)
        offsets = self.block_offsets[row][positions // self.block_tokens]
        return torch.stack((offsets, positions % self.block_tokens), 1).int()

    def write(self, row: int, begin: int, key: Tensor, value: Tensor) -> None:
        """Write K and V rows of positions begin … of a row."""
        self.write_at(row, torch.arange(begin, begin + key.shape[0]), key, value)

    def write_at(self, row: int, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Write K and V rows of the given positions of a row."""
        offsets = self.block_offsets[row].long()[positions // self.block_tokens]
        for view, source in ((self.key, key), (self.value, value)):
            # torch does not write to a view whose units overlap by index; flat memory does not.
            unit, token, _, _ = view.stride()
            starts = offsets * unit + positions % self.block_tokens * token
            row_size = source.shape[1] * source.shape[2]
            end = view.storage_offset() + (view.shape[0] - 1) * unit + view.shape[1] * token
            flat = view.as_strided((end - view.storage_offset(),), (1,))
            flat[starts[:, None] + torch.arange(row_size)] = source.reshape(-1, row_size)


def make_paged_cache(
    max_lens: list[int],
    num_kv_heads: int,
    head_size: int,
    block_tokens: int,
    dtype: torch.dtype,
    *,
    seed: int = 0,
) -> PagedCache:
    """Make a cache for rows of the given lengths; every byte that is not written reads as NaN."""
    rows_bytes = block_tokens * num_kv_heads * head_size * dtype.itemsize
    field_bytes = -(-rows_bytes // 64) * 64
    block_units = -(-(2 * field_bytes + 64) // UNIT_BYTES)
    blocks = [-(-n // block_tokens) for n in max_lens]
    num_blocks = sum(blocks)
    arena = torch.empty((num_blocks + 1) * block_units * UNIT_BYTES, dtype=torch.uint8)
    arena.view(dtype).fill_(float("nan"))
    num_units = num_blocks * block_units
    views = [
        _view_field(
            arena.view(dtype),
            64 + i * field_bytes,
            num_units,
            block_tokens,
            num_kv_heads,
            head_size,
        )
        for i in range(2)
    ]
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)) * block_units
    offsets = torch.zeros(len(blocks), max(blocks, default=0), dtype=torch.int32)
    for row, ids in enumerate(torch.split(order, blocks)):
        offsets[row, : len(ids)] = ids
    return PagedCache(key=views[0], value=views[1], block_offsets=offsets)


def _view_field(
    arena: Tensor,
    start_bytes: int,
    num_units: int,
    block_tokens: int,
    num_heads: int,
    head_size: int,
) -> Tensor:
    """Return one field of all blocks as an overlapping view of the arena."""
    return arena.as_strided(
        (num_units, block_tokens, num_heads, head_size),
        (UNIT_BYTES // arena.element_size(), num_heads * head_size, head_size, 1),
        start_bytes // arena.element_size(),
    )


def cumulative(lens: list[int]) -> Tensor:
    """Return cu_query_lens of the given query lengths."""
    return torch.tensor([0, *lens]).cumsum(0).int()
