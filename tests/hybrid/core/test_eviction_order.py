"""Which cached blocks go first: what nothing can resume from, then copies that nobody used."""

from __future__ import annotations

import random

from tests.hybrid.core.geometries import qwen3_next_80b
from tests.hybrid.core.test_reuse import Engine
from vllm.core.cache_manager import CacheManager


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


def test_rows_behind_the_last_checkpoint_go_first():
    engine = Engine(qwen3_next_80b(), 2**31, 2048)
    engine.serve([list(range(1000))], max_tokens=2)
    index = engine.cache._index
    assert index is not None
    engine.cache._store.evict([e for e in index.victims(()) if e.group in (0, 1)])
    check_order(engine.cache)
    first = [next(index.victims(())) for _ in range(1)]
    engine.cache._store.evict(first)
    second = next(index.victims(()))
    assert first[0].node.parent == second.node.digest, "from the end, and each one an orphan"
    assert second in index._order._orphans
