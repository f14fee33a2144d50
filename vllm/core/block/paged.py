"""Lifetime Full: every token is kept until the sequence ends."""

from __future__ import annotations

from vllm.core.block.abstract import BlockManager


class PagedBlockManager(BlockManager):
    """Blocks are appended as the sequence grows and none is given back early."""

    needs_whole_prefix = True

    def num_entries(self, num_tokens: int) -> int:
        """ceil(num_tokens / block_tokens)."""
        return -(-num_tokens // self.block_tokens)

    def num_dead_entries(self, num_computed: int) -> int:
        """Nothing dies."""
        return 0

    def skipped_entries(self, num_computed: int, num_new: int) -> tuple[int, int]:
        """Everything is stored."""
        return (0, 0)

    def stable_tokens(self, num_computed: int, num_new: int) -> int:
        """The end of the last block."""
        return self.num_entries(num_computed + num_new) * self.block_tokens

    def can_resume(self, position: int, run_start: int, head_run: int) -> bool:
        """Every token before `position` must be there."""
        return run_start == 0

    def first_resumed_entry(self, position: int) -> int:
        """All entries are held."""
        return 0

    def peak_need(self, max_len: int, max_chunk: int) -> int:
        """The blocks of the whole sequence, however it is cut."""
        return self.num_entries(max_len)
