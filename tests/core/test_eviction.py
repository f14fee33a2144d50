"""Which cached blocks go: the superblock left first, no more of it than is needed, nothing lost.

Chains of one group are laid out by hand; a superblock of group 0 has three blocks, one of group 1
a single one.
"""

from __future__ import annotations

from tests.core.builders import full_group
from vllm.core.block.arena import ArenaShadow, SuperblockArena
from vllm.core.block.table import make_block_managers
from vllm.core.block_store import BlockStore
from vllm.core.eviction import choose_neighbours, choose_victims
from vllm.core.prefix_entry import PrefixEntry
from vllm.core.prefix_index import ChainKey, PrefixIndex

GRAIN = 4


class Cache:
    """An arena and an index, filled chain by chain."""

    def __init__(self, num_superblocks: int) -> None:
        managers = make_block_managers([full_group(f"g{i}", layers=(i,)) for i in range(2)])
        self.arena = SuperblockArena((3, 1), num_superblocks)
        self.index = PrefixIndex(managers, geometry=b"", grain_tokens=GRAIN)
        self.store = BlockStore(self.arena, self.index)
        self._number = 0

    def fill(self, num_grains: int) -> list[int]:
        """List a chain of group 0, held; return its blocks."""
        self._number += 1
        chain: list[ChainKey] = []
        tokens = [self._number] * (num_grains * GRAIN)
        self.index.extend_chain(chain, tokens, num_grains, "")
        blocks = [self.store.allocate(0) for _ in range(num_grains)]
        for number, block in enumerate(blocks):
            self.index.register(chain, number, 0, (block,))
        return blocks

    def drop(self, blocks: list[int]) -> None:
        """Give blocks back, the deepest first."""
        for block in reversed(blocks):
            self.store.drop(0, block)

    def choose(self, *needs: int) -> list[int]:
        victims = choose_victims(self.index, ArenaShadow(self.arena), needs, ())
        assert victims is not None
        return list_blocks(victims)

    def choose_beside(self, *needs: int) -> list[int]:
        return list_blocks(choose_neighbours(self.index, ArenaShadow(self.arena), needs))


def list_blocks(entries: list[PrefixEntry]) -> list[int]:
    return sorted(block for entry in entries for block in entry.block_ids)


def test_the_superblock_that_was_left_first_is_emptied_for_another_group():
    cache = Cache(3)
    old, young = cache.fill(3), cache.fill(3)
    cache.drop(young)
    cache.drop(old)
    assert cache.choose(0, 1) == []  # one is free
    cache.store.allocate(1)
    assert cache.choose(0, 1) == young
    assert cache.choose(0, 2) == old + young


def test_a_use_makes_a_superblock_the_one_left_last():
    cache = Cache(2)
    first, second = cache.fill(3), cache.fill(3)
    cache.drop(first)
    cache.drop(second)
    assert cache.choose(0, 1) == first
    node = next(entry.node for entry in cache.index.entries_among(0, first))
    cache.store.touch(node.digest)
    assert cache.choose(0, 1) == second


def test_of_its_own_superblocks_a_group_takes_no_more_than_it_needs():
    cache = Cache(2)
    first, second = cache.fill(3), cache.fill(3)
    cache.drop(first)
    cache.drop(second)
    assert cache.choose(1, 0) == first[2:], "the deepest of the superblock that was left first"
    assert cache.choose(2, 0) == first[1:]
    assert cache.choose(4, 0) == sorted([*first, second[2]])


def test_what_could_not_be_reached_any_more_goes_along():
    """A chain over two superblocks, of which the one with its beginning was left first."""
    cache = Cache(2)
    chain = cache.fill(5)
    other = cache.fill(1)  # beside the end of the chain
    cache.drop(chain)
    cache.drop(other)
    assert cache.choose(0, 1) == chain, "its beginning makes room, its end goes along"


def test_blocks_beside_held_ones_are_found_whatever_made_them_so():
    cache = Cache(2)
    chain = cache.fill(3)
    cache.drop(chain[1:])
    assert cache.choose_beside(1, 0) == chain[2:], "given back beside one that is held"
    assert cache.choose_beside(2, 0) == chain[1:], "one after the other, the deepest first"
    assert cache.choose_beside(3, 0) == [], "not enough: nothing is taken"
    cache.drop(chain[:1])
    assert cache.choose_beside(1, 0) == [], "all are idle: another group could have the superblock"
    cache.store.hold(0, chain[0])
    assert cache.choose_beside(1, 0) == chain[2:], "held again"
    cache.store.evict(cache.index.entries_among(0, chain[2:]))
    assert cache.choose_beside(2, 0) == chain[1:2], "the next, and the one that is free"


def test_what_others_need_does_not_go_although_it_lies_beside_a_held_block():
    cache = Cache(2)
    chain = cache.fill(2)
    cache.fill(1)  # held, beside both
    keys: list[ChainKey] = []
    cache.index.extend_chain(keys, [1] * (3 * GRAIN), 3, "")
    end = cache.store.allocate(0)
    cache.index.register(keys, 2, 0, (end,))
    rest = cache.fill(2)
    cache.drop([*chain, end, *rest])
    assert not any(cache.arena.num_free_slots)
    assert cache.choose_beside(1, 0) == [], "the grain behind both is in an idle superblock"
    cache.store.evict(cache.index.entries_among(0, [end]))
    assert cache.choose_beside(2, 0) == chain[1:], "beside the slot that is free now"
