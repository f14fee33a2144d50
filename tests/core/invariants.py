"""What must hold after every call: counts recomputed from scratch, references, reachability."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tests.core.builders import Harness
from vllm.core.block.arena import SuperblockArena
from vllm.core.cache_manager import CacheManager
from vllm.sequence import NO_BLOCK, Sequence, SequenceStatus


def check_arena(arena: SuperblockArena) -> None:
    """Every running count equals what the superblocks say."""
    num_groups = len(arena.blocks_per_superblock)
    free_slots, reclaimable, owned, held_blocks = ([0] * num_groups for _ in range(4))
    idle = set()
    free = set(arena._free)
    for superblock in range(arena.num_superblocks):
        group = arena._owner[superblock]
        if group < 0:
            assert superblock in free
            assert arena.superblock_counts(superblock) == (0, 0)
            continue
        assert superblock not in free
        per = arena.blocks_per_superblock[group]
        refs = arena._refs[group][superblock * per : (superblock + 1) * per]
        held = sum(count > 0 for count in refs)
        slots = arena._slots[superblock]
        assert len(set(slots)) == len(slots)
        assert all(refs[slot] == 0 for slot in slots)
        used = per - len(slots)
        assert used > 0
        assert arena.superblock_counts(superblock) == (used, held)
        owned[group] += 1
        held_blocks[group] += held
        free_slots[group] += len(slots)
        if held:
            reclaimable[group] += per - held
        else:
            idle.add(superblock)
        for number, bucket in enumerate(arena._buckets[group]):
            assert (superblock in bucket) == (number == used)
            assert bool(bucket) == bool(arena._bucket_masks[group] >> number & 1)
    assert len(free) == len(arena._free)
    assert arena.num_free_slots == free_slots
    assert arena.num_reclaimable == reclaimable
    assert set(arena._idle) == idle
    assert arena.num_idle == len(idle)
    assert [arena.num_owned_superblocks(g) for g in range(num_groups)] == owned
    assert [arena.num_held_blocks(g) for g in range(num_groups)] == held_blocks


def check_references(
    cache: CacheManager, sequences: list[Sequence], others: Iterable[tuple[int, int]] = ()
) -> None:
    """A block has as many references as tables (and copy-on-write sources) name it.

    Beside them only `others` and pins, each a (group, block) pair.
    """
    others = list(others) + cache._store._pinned
    for group in range(len(cache.arena.blocks_per_superblock)):
        expected = Counter(block for g, block in others if g == group)
        for sequence in sequences:
            if sequence.cache.tables:
                expected.update(b for b in sequence.cache.tables[group] if b != NO_BLOCK)
            if sequence.cache.copy_sources:
                expected.update(b for b in sequence.cache.copy_sources[group] if b != NO_BLOCK)
        actual = {b: c for b, c in enumerate(cache.arena._refs[group]) if c}
        assert actual == dict(expected), f"group {group}: {actual} is not {dict(expected)}"


def check_index(cache: CacheManager) -> None:
    """Evictable means held by nobody; children go first; nothing evictable is out of reach."""
    index = cache._index
    if index is None:
        return
    order = {entry: place for place, entry in enumerate(index._evictable)}
    for node in index._nodes.values():
        assert any(node.entries)
        for group, entry in enumerate(node.entries):
            if entry is None:
                continue
            held = sum(cache.arena.ref_count(group, b) > 0 for b in entry.block_ids)
            assert entry.num_held == held
            assert (entry in order) == (held == 0)
            assert all(index._entry_of[group][b] is entry for b in entry.block_ids)
            if entry in order and node.parent and index.needs_parent(group):
                parent = index._nodes[node.parent].entries[group]
                assert parent is not None, "a cached grain nothing can reach"
                assert parent not in order or order[parent] > order[entry]
    cached = [cache.arena.num_cached_blocks(g) for g in range(len(index._entry_of))]
    known = [
        sum(cache.arena.ref_count(g, b) == 0 for b in entry_of)
        for g, entry_of in enumerate(index._entry_of)
    ]
    assert cached == known
    assert {(node.parent, node) for node in index._nodes.values()} == {
        (parent, node) for parent, nodes in index._children.items() for node in nodes
    }
    assert all(index._children.values())
    check_neighbours(cache)


def check_neighbours(cache: CacheManager) -> None:
    """No entry beside held blocks that could go is missing where such are looked for."""
    index, arena = cache._index, cache.arena
    if index is None or len(index._beside) == 1:
        return
    for entry in index._evictable:
        group = entry.group
        is_beside = all(
            arena.superblock_counts(arena.superblock_of(group, block))[1]
            for block in entry.block_ids
        )
        if is_beside and not any(index.children_of(entry)):
            assert entry in index.beside(group)
    assert all(index._entry_of[e.group][e.block_ids[0]] is e for b in index._beside for e in b)


def check_need(harness: Harness, running: list[Sequence]) -> None:
    """Rows of the newest plan hold what the one function of need says, and no more.

    Beyond it only rows that they need not have stored, or not yet given back.
    """
    by_id = {s.seq_id: s for s in running}
    for row in harness.plans[-1].rows if harness.plans else ():
        sequence = by_id.get(row.seq_id)
        if sequence is None:
            continue
        n, q = row.num_computed_tokens, row.num_new_tokens
        for manager, table, num_dead in zip(
            harness.cache._managers, sequence.cache.tables, sequence.cache.num_dead, strict=True
        ):
            held = sum(block != NO_BLOCK for block in table)
            alive = len(table) - max(0, num_dead - manager.first_mortal_entry)
            need = manager.need(n, q)
            assert need <= held <= max(need, alive), (n, q, table, manager.group.lifetime)
            assert not manager.needs_whole_prefix or held == need
            assert len(table) == manager.num_entries(n + q)


def check_scheduler(
    harness: Harness, ended: list[Sequence], others: Iterable[tuple[int, int]] = ()
) -> None:
    """Seats, ranks and blocks; `ended` are over-runs whose blocks are still out.

    `others` are (group, block) pairs of references beside those of tables.
    """
    roster = harness.scheduler._roster
    sequences = [s for state in roster.requests.values() for s in state.sequences]
    ranks = [s.rank for s in roster.running]
    assert ranks == sorted(ranks)
    assert roster.num_seats <= harness.config.max_num_seqs
    running = [s for s in sequences if s.status is SequenceStatus.RUNNING]
    assert sorted(s.seq_id for s in running) == sorted(s.seq_id for s in roster.running)
    assert roster.num_reserved_seats == sum(s.state.num_seats - 1 for s in running)
    waiting = [s for s in sequences if s.status is SequenceStatus.WAITING]
    assert len(waiting) == len(roster.waiting)
    assert all(not s.cache.tables for s in waiting)
    draining = [s for s in sequences if s.status is SequenceStatus.DRAINING]
    assert roster.num_releasing == len(draining) + len(ended)
    check_need(harness, running)
    check_references(harness.cache, [*sequences, *ended], others)
    check_arena(harness.cache.arena)
    check_index(harness.cache)
