"""Which cached blocks go when room is needed.

Called by `placement.py` and `block_store.py`. Works on a shadow of the arena, so that a refused
plan leaves no trace; it evicts nothing itself. A cache that has served for a while is full, so that
this runs in nearly every step: it looks at what it takes, not at all that is cached.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import chain

from vllm.core.block.arena import ArenaShadow
from vllm.core.prefix_entry import PrefixEntry
from vllm.core.prefix_index import PrefixIndex


def choose_victims(
    index: PrefixIndex | None,
    shadow: ArenaShadow,
    needs: Sequence[int],
    protected: Container[PrefixEntry],
) -> list[PrefixEntry] | None:
    """Return the cached entries to evict so that `needs` fit, none too many; None if they cannot.

    Entries are taken on the shadow until the needs fit; then every one that turns out not to be
    needed is given back, the one that would have gone last first. What remains frees slots of the
    right group, completes a superblock, or could not be reached any more without an entry that
    does.

    Args:
        index: what is cached; None if nothing is.
        shadow: consumed; holds supposed before the call count.
        needs: new blocks of each group.
        protected: entries that must stay.
    """
    if shadow.fits(needs):
        return []
    if index is None or not shadow.fits_after_eviction(needs):
        return None
    taken = _Taken(shadow)
    _take_neighbours(index, taken, needs, protected)
    if not shadow.fits(needs):
        for entry in _in_order(index, shadow, protected):
            taken.add(index, entry)
            if shadow.fits(needs):
                break
        else:
            return None
    return taken.give_back(index, needs)


def choose_neighbours(
    index: PrefixIndex, shadow: ArenaShadow, needs: Sequence[int]
) -> list[PrefixEntry]:
    """Return cached entries to evict so that groups need not claim one of the last superblocks.

    Only blocks beside held ones are taken: they are of no use to another group. Where that is not
    enough, nothing is. Nothing is taken without which an entry that stays could not be reached.

    Args:
        index: what is cached.
        shadow: consumed.
        needs: new blocks of each group.
    """
    taken = _Taken(shadow)
    _take_neighbours(index, taken, needs, ())
    short = any(shadow.lacks_slots(group, need) for group, need in enumerate(needs))
    return [] if short else list(taken.entries)


class _Taken:
    """Entries taken so far, in order, and the shadow without them."""

    def __init__(self, shadow: ArenaShadow) -> None:
        self.shadow = shadow
        self.entries: dict[PrefixEntry, None] = {}

    def add(self, index: PrefixIndex, entry: PrefixEntry) -> None:
        """Take an entry after all that can be evicted and could not be reached without it."""
        found = [entry] if entry not in self.entries else []
        for one in found:  # grows
            for child in index.children_of(one):
                if child.num_held == 0 and child not in self.entries:
                    found.append(child)
        for one in reversed(found):
            self.entries[one] = None
            for block in one.block_ids:
                self.shadow.evict(one.group, block)

    def give_back(self, index: PrefixIndex, needs: Sequence[int]) -> list[PrefixEntry]:
        """Return those without which the needs do not fit, and those behind them."""
        gone: dict[PrefixEntry, None] = {}
        for entry in reversed(self.entries):
            if gone and index.needs_parent(entry.group) and index.parent_of(entry) in gone:
                gone[entry] = None
                continue
            for block in entry.block_ids:
                self.shadow.restore(entry.group, block)
            if not self.shadow.fits(needs):
                for block in entry.block_ids:
                    self.shadow.evict(entry.group, block)
                gone[entry] = None
        return list(gone)


def _take_neighbours(
    index: PrefixIndex, taken: _Taken, needs: Sequence[int], protected: Container[PrefixEntry]
) -> None:
    """Take entries beside held blocks, of each group as long as it lacks slots of its own.

    None without which an entry that stays could not be reached.
    """
    shadow = taken.shadow
    for group, need in enumerate(needs):
        others = []
        for candidate in index.beside(group):
            if not shadow.lacks_slots(group, need):
                break
            if not _is_spare(index, taken, candidate):
                others.append(candidate)
                continue
            entry: PrefixEntry | None = candidate
            while entry is not None and entry not in protected and _is_spare(index, taken, entry):
                taken.add(index, entry)
                if not shadow.lacks_slots(group, need):
                    break
                entry = index.parent_of(entry) if index.needs_parent(group) else None
        index.note_not_beside(others)


def _is_spare(index: PrefixIndex, taken: _Taken, entry: PrefixEntry) -> bool:
    """Whether an entry can go, is of use to its own group alone, and nothing is behind it."""
    return (
        entry.num_held == 0
        and all(taken.shadow.is_shared(entry.group, block) for block in entry.block_ids)
        and all(child in taken.entries for child in index.children_of(entry))
    )


def _in_order(
    index: PrefixIndex, shadow: ArenaShadow, protected: Container[PrefixEntry]
) -> Iterator[PrefixEntry]:
    """Yield entries in the order in which they should go.

    Where superblocks have several blocks, those without a held one are emptied one after the other,
    that which was left first before the others, the deepest entry first; then comes all the rest.
    """
    idle = shadow.idle_superblocks() if shadow.is_divided else ()  # else the rest is in that order
    for group, blocks in chain(_first_superblocks(index, shadow), idle):
        entries = index.entries_among(group, blocks[::-1])
        if not any(entry.num_held or entry in protected for entry in entries):
            yield from entries
    yield from index.victims(protected)


def _first_superblocks(index: PrefixIndex, shadow: ArenaShadow) -> Iterator[tuple[int, range]]:
    """Yield superblocks with nothing but entries that go before all others."""
    for entry in index.first_victims:
        group, block = entry.group, entry.block_ids[0]
        blocks = shadow.blocks_beside(group, block)
        if not shadow.is_shared(group, block) and all(
            other in index.first_victims for other in index.entries_among(group, blocks)
        ):
            yield group, blocks
