"""Lifetime Window: the last W tokens are kept, and the first ones where the layer has sinks.

Served through `core/block/table.py`. Position p sees p-W+1 … p, so a step from n on reads no row
before n-W+1, and a step that ends at n need not store one. `RecentBlockManager` holds what windows
and chunks share: everything follows from the first row that a step can still see.
"""

from __future__ import annotations

from abc import abstractmethod

from vllm.cache_spec import KVCacheGroup, Window
from vllm.core.block.abstract import BlockManager


class RecentBlockManager(BlockManager):
    """Keeps the rows from some position on, and whole blocks of them only.

    Attributes:
        span: most rows, sinks aside, that a step can see of those before it.
        sinks: first tokens that stay visible for ever.
    """

    def __init__(self, group: KVCacheGroup, *, span: int, sinks: int = 0) -> None:
        super().__init__(group)
        self.span = span
        self.sinks = sinks

    @abstractmethod
    def first_visible(self, position: int) -> int:
        """Return the first row, sinks aside, that a step from `position` on can see."""

    @abstractmethod
    def next_death(self, first_dead: int) -> int:
        """Return the least `position` from which entry `first_dead` is seen no more."""

    def num_entries(self, num_tokens: int) -> int:
        """ceil(num_tokens / block_tokens): dead and skipped entries keep their place."""
        return -(-num_tokens // self.block_tokens)

    @property
    def first_mortal_entry(self) -> int:
        """Blocks that hold a sink stay."""
        return -(-self.sinks // self.block_tokens)

    def num_dead_entries(self, num_computed: int) -> int:
        """Blocks all of whose rows lie before the first visible one."""
        return self.first_visible(num_computed) // self.block_tokens

    def skipped_entries(self, num_computed: int, num_new: int) -> tuple[int, int]:
        """Fresh blocks that are dead as soon as the step has ended."""
        start = max(self.num_entries(num_computed), self.first_mortal_entry)
        return start, self.num_dead_entries(num_computed + num_new)

    def stable_tokens(self, num_computed: int, num_new: int) -> int:
        """The end of the last block, or the next death of an entry if that comes before."""
        total = num_computed + num_new
        first_alive = max(self.num_dead_entries(num_computed), self.first_mortal_entry)
        end = self.num_entries(total) * self.block_tokens
        return max(total, min(end, self.next_death(first_alive)))

    def can_resume(self, position: int, run_start: int, head_run: int) -> bool:
        """All rows that a step from `position` on sees must be there."""
        first = self.first_visible(position)
        return run_start <= first and head_run >= min(self.sinks, position)

    def first_resumed_entry(self, position: int) -> int:
        """The entry of the first visible row."""
        return self.num_dead_entries(position)

    def peak_need(self, max_len: int, max_chunk: int) -> int:
        """What is seen before a step and what is seen after it, both at their worst phase."""
        before = self._most_blocks(self.span)
        after = self._most_blocks(min(self.span, max_chunk))
        return min(self.num_entries(max_len), self.first_mortal_entry + before + after)

    def _most_blocks(self, num_rows: int) -> int:
        """Return the most blocks from that of the first of `num_rows` rows to the last filled."""
        return (num_rows + self.block_tokens - 2) // self.block_tokens + 1


class WindowBlockManager(RecentBlockManager):
    """A window over the last tokens, with sinks."""

    def __init__(self, group: KVCacheGroup) -> None:
        lifetime = group.lifetime
        assert isinstance(lifetime, Window), "the table pairs managers with lifetimes"
        super().__init__(group, span=max(1, lifetime.tokens) - 1, sinks=lifetime.sinks)

    def first_visible(self, position: int) -> int:
        """Position p sees p-W+1 … p."""
        return max(0, position - self.span)

    def next_death(self, first_dead: int) -> int:
        """The window has moved past the entry's last row."""
        return (first_dead + 1) * self.block_tokens + self.span
