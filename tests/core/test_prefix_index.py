"""Prefix hits against a brute-force oracle over every position, for every kind of lifetime."""

from __future__ import annotations

import random

import pytest

from tests.core.builders import full_group
from vllm.core.block.abstract import BlockManager
from vllm.core.block.paged import PagedBlockManager
from vllm.core.prefix_index import PrefixIndex, describe_geometry

GRAIN = 4


class LastTokens(PagedBlockManager):
    """As a window of 10 tokens with 3 sinks would resume."""

    needs_whole_prefix = False
    window, sinks = 10, 3

    def can_resume(self, position: int, run_start: int, head_run: int) -> bool:
        return run_start <= max(0, position - self.window + 1) and head_run >= min(
            self.sinks, position
        )


class Checkpoint(PagedBlockManager):
    """As a state would resume: something is kept at exactly this position."""

    needs_whole_prefix = False

    def can_resume(self, position: int, run_start: int, head_run: int) -> bool:
        return run_start < position


def resumes(kind: type[BlockManager], grains: set[int], position: int) -> bool:
    """The oracle: which tokens must be there, said directly."""
    tokens = {t for g in grains for t in range(g * GRAIN, (g + 1) * GRAIN)}
    if kind is PagedBlockManager:
        needed = range(position)
    elif kind is LastTokens:
        start = max(0, position - LastTokens.window + 1)
        needed = [*range(start, position), *range(min(LastTokens.sinks, position))]
    else:
        needed = [position - 1]
    return tokens.issuperset(needed)


@pytest.mark.parametrize("seed", range(60))
def test_hit_is_the_longest_position_where_all_groups_resume(seed):
    rng = random.Random(seed)
    kinds = rng.choice(
        [
            [PagedBlockManager],
            [PagedBlockManager, LastTokens],
            [PagedBlockManager, Checkpoint],
            [LastTokens, Checkpoint],
            [Checkpoint],
            [PagedBlockManager, LastTokens, Checkpoint],
        ]
    )
    groups = [full_group(f"g{i}", block_tokens=GRAIN) for i in range(len(kinds))]
    managers = [kind(group) for kind, group in zip(kinds, groups, strict=True)]
    index = PrefixIndex(managers, geometry=describe_geometry(groups), grain_tokens=GRAIN)
    tokens = [rng.randrange(5) for _ in range(60)]
    density = rng.choice([0.5, 0.9, 0.97])
    present: list[set[int]] = [set() for _ in kinds]
    chain: list = []
    index.extend_chain(chain, tokens, 15, "")
    for group in range(len(kinds)):
        for number in range(15):
            if rng.random() < density:
                assert index.register(chain, number, group, (number,))
                assert not index.register(chain, number, group, (100 + number,))
                present[group].add(number)
    for max_tokens in range(61):
        expected = max(
            (
                p
                for p in range(GRAIN, max_tokens + 1, GRAIN)
                if all(
                    resumes(kind, grains, p) for kind, grains in zip(kinds, present, strict=True)
                )
            ),
            default=0,
        )
        assert len(index.match([], tokens, max_tokens, "")) * GRAIN == expected
    changed = list(tokens)
    changed[rng.randrange(4)] += 5
    assert index.match([], changed, 60, "") == []


def test_keys_cover_salt_geometry_and_everything_before():
    def digest(tokens, salt="", **group):
        groups = [full_group(**group)]
        index = PrefixIndex(
            [PagedBlockManager(groups[0])], geometry=describe_geometry(groups), grain_tokens=4
        )
        chain: list = []
        index.extend_chain(chain, tokens, len(tokens) // 4, salt)
        return chain[-1][0]

    base = digest([1, 2, 3, 4, 5, 6, 7, 8])
    assert base == digest([1, 2, 3, 4, 5, 6, 7, 8])
    others = [
        digest([9, 2, 3, 4, 5, 6, 7, 8]),
        digest([5, 6, 7, 8]),
        digest([1, 2, 3, 4, 5, 6, 7, 8], salt="a"),
        digest([1, 2, 3, 4, 5, 6, 7, 8], layers=(0, 1)),
        digest([1, 2, 3, 4, 5, 6, 7, 8], heads=2),
        digest([1, 2, 3, 4, 5, 6, 7, 8], block_tokens=2),
    ]
    assert len({base, *others}) == len(others) + 1


def test_tokens_are_compared_on_a_hit():
    group = full_group(block_tokens=4)
    index = PrefixIndex([PagedBlockManager(group)], geometry=b"", grain_tokens=4)
    chain: list = []
    index.extend_chain(chain, [1, 2, 3, 4], 1, "")
    index.register(chain, 0, 0, (0,))
    forged = [(chain[0][0], b"other tokens")]
    assert index.match(forged, [1, 2, 3, 4], 4, "") == []
    assert len(index.match([], [1, 2, 3, 4], 4, "")) == 1
