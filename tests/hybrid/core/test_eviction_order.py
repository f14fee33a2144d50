"""Which cached blocks go first: what nothing can resume from, then copies that nobody used."""

from __future__ import annotations

import random

from tests.hybrid.core.geometries import qwen3_next_80b
from tests.hybrid.core.test_reuse import Engine
from vllm.core.cache_manager import CacheManager
from vllm.core.prefix_entry import PrefixEntry
from vllm.core.prefix_index import PrefixIndex


def check_order(cache: CacheManager) -> None:
    """The classes that events keep up to date equal those computed from scratch (trap 14)."""
    index = cache._index
    if index is None:
        return
    order = index._order
    orphans, unproven = set(), set()
    parents = [node.parent for node in index._nodes.values()]
    for node in index._nodes.values():
        lacks_rows = any(node.entries[g] is None for g in order._whole)
        has_copies = all(node.entries[g] is not None for g in order._states)
        for group, entry in enumerate(node.entries):
            if entry is None or entry.num_held or not order._states:
                continue
            is_copy = group in order._states
            is_leaf = node.digest not in parents
            if lacks_rows or (not has_copies and (is_copy or is_leaf)):
                orphans.add(entry)
            elif is_copy and not entry.num_hits:
                unproven.add(entry)
    assert set(order._orphans) == orphans
    assert set(order._unproven) == unproven


def find_depth(index: PrefixIndex, entry: PrefixEntry) -> int:
    """Grains before an entry's."""
    node, depth = entry.node, 0
    while node.parent in index._nodes:
        node, depth = index._nodes[node.parent], depth + 1
    return depth


def test_a_prefix_that_is_used_survives_a_flood_of_prompts_that_are_not():
    rng = random.Random(3)
    engine = Engine(qwen3_next_80b(), 1.5 * 2**30, 2048)
    shared = [rng.randrange(1000) for _ in range(1472)]

    def tail() -> list[int]:
        return [rng.randrange(1000) for _ in range(200)]

    engine.serve([shared + tail()])
    engine.serve([shared + tail()])
    assert engine.serve([shared + tail()]) == [1472]
    for _ in range(40):
        engine.serve([[rng.randrange(1000) for _ in range(1200)]])
        check_order(engine.cache)
    assert engine.serve([shared + tail()]) == [1472]


def test_both_stripes_of_a_state_go_together():
    rng = random.Random(4)
    engine = Engine(qwen3_next_80b(), 1.5 * 2**30, 2048)
    for _ in range(30):
        engine.serve([[rng.randrange(1000) for _ in range(rng.randint(65, 1500))]])
        index = engine.cache._index
        assert index is not None
        lonely = [
            node
            for node in index._nodes.values()
            if (node.entries[0] is None) != (node.entries[1] is None)
        ]
        assert len(lonely) <= 1  # the rest of an eviction that needed one block; it goes next


def test_rows_that_nothing_can_resume_from_are_not_kept():
    engine = Engine(qwen3_next_80b(), 2**31, 2048)
    engine.serve([list(range(1000))], max_tokens=80)  # the last copy is behind the prompt
    arena, index = engine.cache.arena, engine.cache._index
    assert index is not None
    check_order(engine.cache)
    last = max((e for e in index._evictable if e.group == 0), key=lambda e: find_depth(index, e))
    assert max(find_depth(index, e) for e in index._evictable) == find_depth(index, last)
    engine.cache._store.evict([e for e in index._evictable if e.group == 0])
    check_order(engine.cache)
    assert not index._evictable, "rows without a checkpoint, and the other stripe of it"
    assert arena.num_free_superblocks == arena.num_superblocks
