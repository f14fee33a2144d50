"""Which cached blocks go when room is needed.

Called by `placement.py` and `block_store.py`. Works on a shadow of the arena, so that a refused
plan leaves no trace; it evicts nothing itself.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import chain

from vllm.core.block.arena import ArenaShadow
from vllm.core.prefix_index import PrefixEntry, PrefixIndex


def choose_victims(
    index: PrefixIndex | None,
    shadow: ArenaShadow,
    needs: Sequence[int],
    protected: Container[PrefixEntry],
) -> list[PrefixEntry] | None:
    """Return the cached entries to evict so that `needs` fit, none too many; None if they cannot.

    Entries are taken in eviction order on the shadow until the needs fit; then every one that turns
    out not to be needed is given back, the one that would have gone last first. What remains frees
    slots of the right group, completes a superblock, or could not be reached any more without an
    entry that does.

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
    taken: dict[PrefixEntry, None] = {}
    for entry in chain(_neighbours(index, shadow, needs, protected), index.victims(protected)):
        if entry in taken:
            continue
        for block in entry.block_ids:
            shadow.evict(entry.group, block)
        taken[entry] = None
        if shadow.fits(needs):
            break
    else:
        return None
    victims = [taken.popitem()[0]]
    gone = {(victims[0].node.digest, victims[0].group)}
    for entry in reversed(taken):
        is_orphan = index.needs_parent(entry.group) and (entry.node.parent, entry.group) in gone
        if is_orphan:
            victims.append(entry)
            gone.add((entry.node.digest, entry.group))
            continue
        for block in entry.block_ids:
            shadow.restore(entry.group, block)
        if not shadow.fits(needs):
            for block in entry.block_ids:
                shadow.evict(entry.group, block)
            victims.append(entry)
            gone.add((entry.node.digest, entry.group))
    return victims


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
    taken: list[PrefixEntry] = []
    for entry in _neighbours(index, shadow, needs, ()):
        for block in entry.block_ids:
            shadow.evict(entry.group, block)
        taken.append(entry)
    short = any(shadow.lacks_slots(group, need) for group, need in enumerate(needs))
    return [] if short else taken


def _neighbours(
    index: PrefixIndex,
    shadow: ArenaShadow,
    needs: Sequence[int],
    protected: Container[PrefixEntry],
) -> Iterator[PrefixEntry]:
    """Yield entries beside held blocks, of each group as long as it lacks slots of its own.

    None without which an entry that stays could not be reached. The caller evicts what it gets
    from the shadow. With one group there is no difference between its blocks, and none is yielded.
    """
    if len(needs) == 1:
        return
    short = [shadow.lacks_slots(group, need) for group, need in enumerate(needs)]
    needed: set[tuple[bytes, int]] = set()
    for entry in index.victims(protected):
        if not any(short):
            return
        group = entry.group
        if (
            not short[group]
            or (entry.node.digest, group) in needed
            or not all(shadow.is_shared(group, block) for block in entry.block_ids)
        ):
            if index.needs_parent(group):
                needed.add((entry.node.parent, group))
        else:
            yield entry
            short[group] = shadow.lacks_slots(group, needs[group])
