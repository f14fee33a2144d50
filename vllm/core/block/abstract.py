"""The rules of one lifetime: which entries of a block table exist, die, are stored, can be resumed.

One small subclass for each lifetime, listed in `core/block/table.py`. `core/need.py` and the cache
manager derive everything from these answers: need, allocation, freeing and prefix hits can
therefore not disagree. Subclasses hold no state and allocate nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from vllm.cache_spec import KVCacheGroup


class BlockManager(ABC):
    """How block tables of one group behave.

    A table is indexed by position: entry i is the block that holds tokens [i*t, (i+1)*t), t being
    `block_tokens`. n is the number of tokens computed before a step, q the number it adds.

    Attributes:
        is_append_only: rows once written never change, so that a branch may share its parent's
            blocks at any later time. A group for which this is False is recomputed by branches.
        needs_whole_prefix: no position can be resumed behind a gap in the cached blocks.
        is_positional: entries are blocks of tokens by position. Where this is False a sequence has
            one block for all of it, written in every step, and what is cached of a grain is a copy
            made at the grain's end.
    """

    is_append_only = True
    is_positional = True
    needs_whole_prefix = False

    def __init__(self, group: KVCacheGroup) -> None:
        self.group = group
        self.block_tokens = group.block_tokens

    @abstractmethod
    def num_entries(self, num_tokens: int) -> int:
        """Return the entries of a table that covers `num_tokens`."""

    @abstractmethod
    def num_dead_entries(self, num_computed: int) -> int:
        """Return the end of the table's range that no step from `num_computed` on reads.

        The range starts at `first_mortal_entry`.
        """

    @property
    def first_mortal_entry(self) -> int:
        """Entries before this one never die (attention sinks)."""
        return 0

    @abstractmethod
    def skipped_entries(self, num_computed: int, num_new: int) -> tuple[int, int]:
        """Return the half-open range of fresh entries that the step need not store.

        Their rows are attended to within the step, from the fresh keys and values, and never again.
        """

    @abstractmethod
    def stable_tokens(self, num_computed: int, num_new: int) -> int:
        """Return the length up to which one-token steps after this one leave the table as it is.

        At least num_computed + num_new; just that if some entry dies with this step.
        """

    @abstractmethod
    def can_resume(self, position: int, run_start: int, head_run: int) -> bool:
        """Whether a sequence can go on at `position` from cached blocks.

        Args:
            position: a multiple of the index's grain.
            run_start: cached blocks cover [run_start, position) without a gap; equals `position`
                where the grain before it is missing.
            head_run: cached blocks cover [0, head_run) without a gap.
        """

    @abstractmethod
    def first_resumed_entry(self, position: int) -> int:
        """Return the first mortal entry that a sequence resumed at `position` holds."""

    def need(self, num_computed: int, num_new: int) -> int:
        """Return the blocks that a sequence holds during a step."""
        entries = self.num_entries(num_computed + num_new)
        first_mortal = self.first_mortal_entry
        dead = max(0, min(entries, self.num_dead_entries(num_computed)) - first_mortal)
        skip_start, skip_end = self.skipped_entries(num_computed, num_new)
        skip_start = max(skip_start, first_mortal + dead, self.num_entries(num_computed))
        skipped = max(0, min(entries, skip_end) - skip_start)
        return entries - dead - skipped

    def growth_entries(self, num_tokens: int) -> int:
        """Return blocks enough for `num_tokens` more tokens, of whichever running sequences."""
        return self.num_entries(num_tokens)

    def peak_need(self, max_len: int, max_chunk: int) -> int:
        """Return the most blocks a sequence holds on its way to `max_len` tokens in any chunks."""
        whole = min(max_len, max_chunk)
        candidates = {0, max_len - 1, max(0, max_len - whole)}
        return max(
            self.need(n, q) for n in candidates for q in (1, min(whole, max_len - n)) if q > 0
        )
