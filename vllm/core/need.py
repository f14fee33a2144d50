"""What a request costs in blocks and superblocks: the one function of need.

Start-up (`core/capacity.py`), admission, each step (`core/cache_manager.py`) and the tests all ask
here; the per-lifetime part is `BlockManager.need`. Pure functions, no state.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.core.block.abstract import BlockManager


def peak_blocks(managers: Sequence[BlockManager], max_len: int, max_chunk: int) -> tuple[int, ...]:
    """Return, for each group, the most blocks held on the way to `max_len` tokens."""
    return tuple(manager.peak_need(max_len, max_chunk) for manager in managers)


def count_superblocks(needs: Sequence[int], blocks_per_superblock: Sequence[int]) -> int:
    """Return the superblocks that an empty arena spends on `needs` blocks of each group."""
    return sum(
        -(-need // per_superblock)
        for need, per_superblock in zip(needs, blocks_per_superblock, strict=True)
    )


def count_fresh(
    managers: Sequence[BlockManager], table_lens: Sequence[int], num_computed: int, num_new: int
) -> list[int]:
    """Return, for each group, the blocks that tables of these lengths lack for a step."""
    needs = []
    for manager, length in zip(managers, table_lens, strict=True):
        end = manager.num_entries(num_computed + num_new)
        skip_start, skip_end = manager.skipped_entries(num_computed, num_new)
        skipped = max(0, min(skip_end, end) - max(skip_start, length))
        needs.append(max(0, end - length) - skipped)
    return needs
