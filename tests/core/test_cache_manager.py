"""The cache manager: refused plans leave no trace, eviction order, minimal victims, hand-over."""

from __future__ import annotations

import copy

import pytest

from tests.core.builders import full_group, layout_of
from vllm.core.block.arena import ArenaShadow
from vllm.core.cache_manager import CacheManager
from vllm.core.eviction import choose_victims
from vllm.sequence import SequenceCache
from vllm.step import BlockCopy


def make_cache(num_superblocks: int, per=(1,), block_tokens=(4,), **changes) -> CacheManager:
    groups = [
        full_group(f"g{i}", block_tokens=tokens, layers=(i,))
        for i, tokens in enumerate(block_tokens)
    ]
    layout = layout_of(groups, num_superblocks, per)
    return CacheManager(groups, layout, enable_prefix_caching=True, **changes)


def enter(
    cache: CacheManager,
    tokens: list[int],
    *,
    reserve: tuple[int, ...] | None = None,
    salt: str = "",
) -> SequenceCache | None:
    """Admit a sequence with its whole prompt, as if it had been computed at once."""
    sequence = SequenceCache(salt=salt)
    hit = cache.match(sequence, tokens, len(tokens) - 1)
    admission = cache.plan_admission(
        sequence,
        hit,
        len(tokens) - hit.num_tokens,
        goal_tokens=len(tokens),
        max_chunk=1000,
        reserve=reserve or [0] * len(cache.no_blocks),
    )
    if admission is None:
        return None
    cache.commit_admission(sequence, admission)
    cache.publish(sequence, tokens, len(tokens))
    return sequence


def snapshot(cache: CacheManager) -> object:
    """Everything that could change."""
    state = copy.deepcopy(vars(cache.arena))
    index = cache._index
    order = [(e.group, e.block_ids) for e in index._evictable]
    nodes = {
        digest: [(e.block_ids, e.num_held) if e else None for e in node.entries]
        for digest, node in index._nodes.items()
    }
    return state, order, nodes


@pytest.mark.parametrize("per", [(1,), (3,)])
def test_refused_growth_leaves_no_trace(per):
    cache = make_cache(12 // per[0], per)
    cached = enter(cache, list(range(12)))
    cache.free(cached)  # three cached blocks
    held = enter(cache, list(range(50, 78)))  # seven held, two free
    before = snapshot(cache)
    tables = copy.deepcopy(held.tables)
    copies: list[BlockCopy] = []
    assert cache.extend(held, 28, 4 * 5 + 1, copies) is None  # six more: one too many
    assert snapshot(cache) == before
    assert held.tables == tables
    assert copies == []
    assert cache.extend(held, 28, 4 * 5, copies) is not None  # need - 1 fits exactly


def test_refused_admission_leaves_no_trace_and_keeps_its_own_hit():
    """Trap 12: an admission must never evict the blocks it is about to use."""
    cache = make_cache(6)
    cache.free(enter(cache, list(range(12))))
    other = enter(cache, list(range(50, 58)))
    before = snapshot(cache)
    assert enter(cache, [*range(12), *range(80, 88)]) is None  # 3 hit + 2 new, 1 free
    assert snapshot(cache) == before
    assert enter(cache, [*range(12), 80], reserve=(1,)) is None
    assert snapshot(cache) == before
    fits = enter(cache, [*range(12), 80])
    assert fits is not None
    assert len(set(fits.tables[0]) | set(other.tables[0])) == 6


def test_least_recently_used_goes_first_and_its_end_before_its_start():
    cache = make_cache(6)
    old, young = list(range(12)), list(range(20, 32))
    cache.free(enter(cache, old))
    cache.free(enter(cache, young))
    grower = None
    remaining = []
    for number in range(1, 7):
        if grower is None:
            grower = enter(cache, [90])
        else:
            assert cache.extend(grower, 4 * (number - 1), 4, []) is not None
        hits = [cache.match(SequenceCache(), [*t, 0], 12).num_tokens for t in (old, young)]
        remaining.append(tuple(hits))
    assert remaining == [(8, 12), (4, 12), (0, 12), (0, 8), (0, 4), (0, 0)]


def test_a_hit_makes_a_prefix_young_again():
    cache = make_cache(6)
    first, second = list(range(12)), list(range(20, 32))
    cache.free(enter(cache, first))
    cache.free(enter(cache, second))
    cache.free(enter(cache, first))
    grower = enter(cache, [90])
    hits = [cache.match(SequenceCache(), [*t, 0], 12).num_tokens for t in (first, second)]
    assert grower is not None
    assert hits == [12, 8]


def test_victims_are_none_too_many_when_only_one_completes_a_superblock():
    """Group 1 needs a superblock; of group 0's cached blocks only those of one superblock go."""
    cache = make_cache(2, per=(2, 1), block_tokens=(4, 4))
    # Superblock 0 of group 0 keeps a held block, superblock 1 is all cached.
    index, arena = cache._index, cache.arena
    chain: list = []
    index.extend_chain(chain, list(range(16)), 4, "")
    blocks = [arena.allocate(0) for _ in range(4)]
    for number, block in enumerate(blocks):
        index.register(chain, number, 0, (block,))
    for number in (3, 2, 1):  # released deepest first; block 0 stays held
        arena.release(0, blocks[number])
        index.note_released(0, blocks[number])
    victims = choose_victims(index, ArenaShadow(arena), [0, 1], ())
    assert sorted(b for e in victims for b in e.block_ids) == sorted(blocks[2:])


def test_superblocks_that_change_owner_are_named_for_zeroing():
    cache = make_cache(4, per=(2, 2), block_tokens=(4, 8))
    first = enter(cache, list(range(16)))
    assert cache.finish_step([]) == []
    former = {block // 2 for block in first.tables[0]}
    cache.free(first)
    cache.reset_prefix_cache()
    owned = {cache.arena.allocate(1) // 2 for _ in range(7)}
    assert len(owned) == 4
    assert set(cache.finish_step([])) == former
    assert cache.finish_step([]) == []


def test_fork_copies_once_for_every_branch_but_the_last_holder():
    cache = make_cache(10)
    parent = enter(cache, list(range(10)))
    children = [cache.fork(parent, 10) for _ in range(2)]
    shared = list(parent.tables[0])
    assert all(child.tables[0] == shared[:2] for child in children)
    copies: list[BlockCopy] = []
    cache.free(parent)
    for child in children:
        cache.extend(child, 10, 1, copies)
        cache.finish_step([])
    # The first copies, the second is the last to hold the block and takes it over.
    assert [copy.source for copy in copies] == [shared[2]]
    assert children[0].tables[0][2] == copies[0].target
    assert children[1].tables[0][2] == shared[2]
    for child in children:
        cache.free(child)
    assert cache.usage == 0


def test_fork_never_writes_over_a_block_whose_content_is_cached():
    cache = make_cache(10)
    tokens = list(range(10))
    parent = enter(cache, tokens)
    child = cache.fork(parent, 10)
    source = parent.tables[0][2]
    cache.extend(parent, 10, 2, [])
    cache.publish(parent, [*tokens, 50, 51], 12)  # the shared block is full and cached now
    cache.free(parent)
    copies: list[BlockCopy] = []
    cache.extend(child, 10, 1, copies)
    assert [copy.source for copy in copies] == [source]
    assert child.tables[0][2] != source


def test_partial_last_grain_is_not_shared_between_histories():
    """Blocks smaller than the grain: one block must not serve two different grains."""
    cache = make_cache(12, per=(1, 1), block_tokens=(4, 8))
    tokens = list(range(13))
    parent = enter(cache, tokens)
    child = cache.fork(parent, 13)
    copies: list[BlockCopy] = []
    cache.extend(child, 13, 3, copies)
    assert [(c.group, c.source) for c in copies] == [
        (0, parent.tables[0][2]),
        (0, parent.tables[0][3]),
        (1, parent.tables[1][1]),
    ]
    cache.extend(parent, 13, 3, [])
    cache.publish(parent, [*tokens, 1, 2, 3], 16)
    cache.publish(child, [*tokens, 4, 5, 6], 16)
    cache.finish_step([])
    for tail in ([1, 2, 3], [4, 5, 6]):
        assert cache.match(SequenceCache(), [*tokens, *tail, 0], 16).num_tokens == 16


def test_salt_separates_prefixes():
    cache = make_cache(12)
    cache.free(enter(cache, list(range(12)), salt="a"))
    assert cache.match(SequenceCache(salt="a"), list(range(13)), 12).num_tokens == 12
    assert cache.match(SequenceCache(salt="b"), list(range(13)), 12).num_tokens == 0
    assert cache.match(SequenceCache(), list(range(13)), 12).num_tokens == 0


def test_reset_forgets_and_frees():
    cache = make_cache(12)
    cache.free(enter(cache, list(range(12))))
    held = enter(cache, list(range(20, 32)))
    cache.reset_prefix_cache()
    assert cache.arena.num_free_superblocks == 9
    assert cache.match(SequenceCache(), list(range(13)), 12).num_tokens == 0
    cache.extend(held, 12, 4, [])
    cache.publish(held, list(range(20, 36)), 16)
    cache.free(held)
    assert cache.arena.num_free_superblocks == 12


def test_same_content_computed_twice_stays_reachable():
    """Two sequences compute one prefix; the first owner is evicted, the second continues."""
    cache = make_cache(20)
    tokens = list(range(8))
    a, b = SequenceCache(), SequenceCache()
    for sequence in (a, b):
        admission = cache.plan_admission(
            sequence, cache.match(sequence, tokens, 7), 8, goal_tokens=8, max_chunk=8, reserve=[0]
        )
        cache.commit_admission(sequence, admission)
    cache.publish(a, tokens, 8)
    cache.publish(b, tokens, 8)
    longer = [*tokens, *range(50, 54)]
    cache.extend(b, 8, 4, [])
    cache.publish(b, longer, 12)
    cache.free(a)
    big = enter(cache, list(range(100, 100 + 4 * 17)))  # evicts all that a left
    assert cache.match(SequenceCache(), [*longer, 0], 12).num_tokens == 0
    cache.free(big)
    cache.free(b)
    assert cache.match(SequenceCache(), [*longer, 0], 12).num_tokens == 12


def test_the_source_of_a_copy_is_nobody_elses_until_the_step_is_planned():
    """Its last holder may lose its place in the same step; the copy still reads the block."""
    cache = make_cache(5)
    parent = enter(cache, list(range(6)))
    child = cache.fork(parent, 6)
    source = parent.tables[0][1]
    copies: list[BlockCopy] = []
    cache.extend(child, 6, 1, copies)
    assert [copy.source for copy in copies] == [source]
    cache.free(parent)
    other = enter(cache, list(range(50, 58)))
    assert source not in other.tables[0]
    assert cache.extend(other, 8, 1, []) is None
    cache.finish_step([])
    assert cache.extend(other, 8, 1, []) == ([source],)
