"""The arena against counts recomputed from scratch, and its shadow against the arena itself."""

from __future__ import annotations

import copy
import random

import pytest

from tests.core.invariants import check_arena
from vllm.core.block.arena import ArenaShadow, SuperblockArena


def fits_brute_force(arena: SuperblockArena, needs: list[int]) -> bool:
    """Try it on a copy."""
    trial = copy.deepcopy(arena)
    try:
        for group, need in enumerate(needs):
            for _ in range(need):
                trial.allocate(group)
    except IndexError:
        return False
    return True


def reclaim_all(arena: SuperblockArena, cached: list[set[int]]) -> SuperblockArena:
    trial = copy.deepcopy(arena)
    for group, blocks in enumerate(cached):
        for block in blocks:
            trial.reclaim(group, block)
    return trial


@pytest.mark.parametrize("seed", range(12))
def test_random_use_keeps_every_count(seed):
    rng = random.Random(seed)
    slots = rng.choice([[1], [3], [1, 4], [5, 2], [2, 3, 7]])
    arena = SuperblockArena(slots, rng.randint(1, 8))
    groups = range(len(slots))
    held: list[list[int]] = [[] for _ in groups]  # one item for each reference
    cached: list[set[int]] = [set() for _ in groups]
    for _ in range(250):
        group = rng.choice(groups)
        action = rng.random()
        if action < 0.45:
            needs = [int(g == group) for g in groups]
            if arena.fits(needs):
                block = arena.allocate(group)
                assert block not in held[group]
                assert block not in cached[group]
                held[group].append(block)
            else:
                with pytest.raises(IndexError):
                    arena.allocate(group)
        elif action < 0.7 and held[group]:
            block = held[group].pop(rng.randrange(len(held[group])))
            is_last = arena.release(group, block)
            assert is_last == (block not in held[group])
            if is_last:
                if rng.random() < 0.5:
                    cached[group].add(block)
                else:
                    arena.reclaim(group, block)
        elif action < 0.8 and cached[group]:
            block = cached[group].pop()
            arena.reclaim(group, block)
        elif action < 0.9 and cached[group]:
            block = cached[group].pop()
            assert arena.hold(group, block)
            held[group].append(block)
        elif held[group]:
            block = rng.choice(held[group])
            assert not arena.hold(group, block)
            held[group].append(block)
        check_arena(arena)
        needs = [rng.randint(0, 6) for _ in groups]
        assert arena.fits(needs) == fits_brute_force(arena, needs)
        emptied = reclaim_all(arena, cached)
        assert arena.fits_after_eviction(needs) == fits_brute_force(emptied, needs)
        check_shadow(arena, cached, rng)


def check_shadow(arena: SuperblockArena, cached: list[set[int]], rng: random.Random) -> None:
    """A shadow after some evictions and holds answers as the changed arena would."""
    shadow, trial = ArenaShadow(arena), copy.deepcopy(arena)
    rest = copy.deepcopy(cached)
    for group, blocks in enumerate(cached):
        for block in blocks:
            choice = rng.random()
            if choice < 0.3:
                shadow.evict(group, block)
                trial.reclaim(group, block)
                rest[group].remove(block)
            elif choice < 0.5:
                shadow.hold(group, block)
                trial.hold(group, block)
                rest[group].remove(block)
            elif choice < 0.7:
                shadow.evict(group, block)
                shadow.restore(group, block)
    for _ in range(3):
        needs = [rng.randint(0, 6) for _ in cached]
        assert shadow.fits(needs) == trial.fits(needs)
        emptied = reclaim_all(trial, rest)
        assert shadow.fits_after_eviction(needs) == emptied.fits(needs)


def test_free_slots_are_taken_from_the_fullest_superblock():
    arena = SuperblockArena([4], 3)
    blocks = [arena.allocate(0) for _ in range(10)]
    for block in (*blocks[1:4], blocks[5]):  # superblock 0 keeps one block, superblock 1 three
        arena.release(0, block)
        arena.reclaim(0, block)
    assert arena.allocate(0) // 4 == 1
    assert arena.allocate(0) // 4 == 2
    assert arena.allocate(0) // 4 == 2
    assert arena.allocate(0) // 4 == 0


def test_a_superblock_changes_owner_only_when_empty_and_is_then_reported():
    arena = SuperblockArena([2, 2], 1)
    first, second = arena.allocate(0), arena.allocate(0)
    assert arena.take_changed_owner() == []
    arena.release(0, first)
    arena.reclaim(0, first)
    assert not arena.fits([0, 1])
    arena.release(0, second)
    assert not arena.fits([0, 1])
    assert arena.fits_after_eviction([0, 1])
    arena.reclaim(0, second)
    arena.allocate(1)
    assert arena.take_changed_owner() == [0]
    assert arena.take_changed_owner() == []


def test_double_release_is_caught():
    arena = SuperblockArena([1], 1)
    block = arena.allocate(0)
    arena.release(0, block)
    with pytest.raises(AssertionError, match="released twice"):
        arena.release(0, block)
