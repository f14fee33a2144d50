"""Lifetime State: one state of fixed size for each sequence, overwritten in every step.

Served through `core/block/table.py`. A sequence works on one block from its first token to its
end. A prefix can be resumed only from a copy of the state made at that very position: a checkpoint,
which `core/checkpoint.py` places, writes and restores.
"""

from __future__ import annotations

from vllm.core.block.abstract import BlockManager


class StateBlockManager(BlockManager):
    """One working block for each sequence."""

    is_append_only = False
    is_positional = False

    def num_entries(self, num_tokens: int) -> int:
        """One block as soon as there is a token."""
        return min(1, num_tokens)

    def num_dead_entries(self, num_computed: int) -> int:
        """The working block lives as long as its sequence."""
        return 0

    def skipped_entries(self, num_computed: int, num_new: int) -> tuple[int, int]:
        """The state is always written."""
        return (0, 0)

    def stable_tokens(self, num_computed: int, num_new: int) -> int:
        """No length changes the table."""
        return 1 << 62

    def can_resume(self, position: int, run_start: int, head_run: int) -> bool:
        """There is a copy made at exactly `position`."""
        return run_start < position

    def first_resumed_entry(self, position: int) -> int:
        """The table starts anew; the copy is restored into a block of its own."""
        return 0

    def growth_entries(self, num_tokens: int) -> int:
        """A running sequence has its block already."""
        return 0

    def peak_need(self, max_len: int, max_chunk: int) -> int:
        """The working block; copies are kept only where there is room."""
        return self.num_entries(max_len)
