"""Blocks with their references: the arena and the prefix index kept in step.

Used by `core/cache_manager.py` and what belongs to it. A block that loses its last holder stays if
the index knows its content, else it is free. It decides nothing: who holds what is the caller's
business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.core.block.arena import ArenaShadow, SuperblockArena
from vllm.core.eviction import choose_neighbours, choose_victims
from vllm.core.prefix_entry import PrefixEntry
from vllm.core.prefix_index import ChainKey, PrefixIndex


class BlockStore:
    """Holds and drops blocks.

    Attributes:
        arena: who owns which superblock, and reference counts.
        index: what is cached; None without prefix caching.
    """

    def __init__(self, arena: SuperblockArena, index: PrefixIndex | None) -> None:
        self.arena = arena
        self.index = index
        self._pinned: list[tuple[int, int]] = []

    def allocate(self, group: int) -> int:
        """Return a free block of a group with one reference; IndexError if there is no room."""
        block = self.arena.allocate(group)
        self._note_join(group, block)
        return block

    def hold(self, group: int, block: int) -> None:
        """Add a reference to a block that is held or cached."""
        if self.arena.hold(group, block):
            assert self.index is not None, "only cached blocks have no holder"
            self.index.note_held(group, block)
            self._note_join(group, block)

    def drop(self, group: int, block: int) -> None:
        """Drop a reference; the last one frees the block unless its content is cached."""
        if self.arena.release(group, block) and not (
            self.index is not None and self.index.note_released(group, block)
        ):
            self.arena.reclaim(group, block)

    def pin(self, group: int, block: int) -> None:
        """Take over a reference of the caller until `unpin`: a step being planned needs it."""
        self._pinned.append((group, block))

    def unpin(self) -> None:
        """Drop the references that pins hold."""
        for group, block in self._pinned:
            self.drop(group, block)
        self._pinned.clear()

    def find_room(self, needs: Sequence[int]) -> list[PrefixEntry] | None:
        """Return what to evict so that `needs` new blocks fit; None if they cannot."""
        fits = self.arena.fits(needs)
        if fits and not self.arena.takes_last_superblocks(needs):
            return []
        if self.index is not None and len(needs) > 1:
            neighbours = choose_neighbours(self.index, ArenaShadow(self.arena), needs)
            if fits or neighbours:
                return neighbours
        return [] if fits else choose_victims(self.index, ArenaShadow(self.arena), needs, ())

    def evict(self, entries: Iterable[PrefixEntry]) -> None:
        """Forget cached content that nobody holds, and free its blocks."""
        for entry in entries:
            assert self.index is not None, "entries come from the index"
            self.index.evict(entry)
            self.free_entry(entry)
        self.free_useless()

    def free_useless(self) -> None:
        """Free cached blocks that nothing can resume from."""
        while self.index is not None and self.index.useless:
            entry = next(iter(self.index.useless))
            self.index.evict(entry)
            self.free_entry(entry)

    def take_over(self, entry: PrefixEntry) -> None:
        """Forget cached content that nobody holds, and hold its blocks, which have a new use."""
        assert self.index is not None, "entries come from the index"
        self.index.evict(entry)
        for block in entry.block_ids:
            self.arena.hold(entry.group, block)
            self._note_join(entry.group, block)

    def touch(self, digest: bytes) -> None:
        """Count a use of a cached grain by someone who holds other blocks of the same content."""
        assert self.index is not None, "only with an index is anything cached"
        for entry in self.index.touch(digest):
            for block in entry.block_ids:
                self.arena.touch(entry.group, block)

    def free_entry(self, entry: PrefixEntry) -> None:
        """Free those blocks of a forgotten entry that nobody holds."""
        for block in entry.block_ids:
            if self.arena.ref_count(entry.group, block) == 0:
                self.arena.reclaim(entry.group, block)

    def register(
        self, chain: Sequence[ChainKey], number: int, group: int, table: tuple[int, ...]
    ) -> bool:
        """Offer held blocks to the index as a group's content of grain `number` of a chain.

        Returns:
            False if the index has as much of it in these or other blocks.
        """
        assert self.index is not None, "only with an index is anything offered"
        covered = self.index.displace(chain, number, group, table)
        if covered is not None:
            self.free_entry(covered)
        return self.index.register(chain, number, group, table)

    def must_copy(self, group: int, block: int) -> bool:
        """Whether a held block has another use and so must not be written over."""
        is_known = self.index is not None and self.index.has_entry(group, block)
        return is_known or self.arena.ref_count(group, block) > 1

    def _note_join(self, group: int, block: int) -> None:
        """A block got its first holder: tell the index of cached blocks that lie beside it."""
        if self.index is None or self.arena.blocks_per_superblock[group] == 1:
            return
        superblock = self.arena.superblock_of(group, block)
        num_used, num_held = self.arena.superblock_counts(superblock)
        if num_held == 1 and num_used > 1:
            self.index.note_join(group, self.arena.blocks_of(group, superblock))
