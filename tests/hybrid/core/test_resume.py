"""Prefix hits of real lifetimes against a brute-force `resume(p)`, and what keys depend on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.core.builders import (
    Harness,
    expected_tokens,
    full_group,
    layout_of,
    make_request,
    scheduler_config,
)
from tests.hybrid.core.shapes import draw_groups, state_group, token_group
from vllm.cache_spec import (
    CacheField,
    Chunk,
    Full,
    KVCacheGroup,
    LayerCacheSpec,
    State,
    Window,
    make_group,
)
from vllm.core.block.table import make_block_managers
from vllm.core.prefix_index import PrefixIndex, describe_geometry
from vllm.sequence import NO_BLOCK
from vllm.types import DType

GRAIN = 8


def must_be_there(group: KVCacheGroup, position: int) -> set[int]:
    """Rows of a group without which nothing goes on at `position`."""
    lifetime = group.lifetime
    if isinstance(lifetime, Full):
        return set(range(position))
    if isinstance(lifetime, Chunk):
        return set(range(position // lifetime.tokens * lifetime.tokens, position))
    assert isinstance(lifetime, Window)
    sinks = set(range(min(lifetime.sinks, position)))
    return sinks | set(range(max(0, position - lifetime.tokens + 1), position))


@pytest.mark.parametrize("seed", range(150))
def test_a_hit_is_the_longest_position_at_which_every_group_resumes(seed):
    """Random entries with holes, islands and copies at any grain (trap 11)."""
    rng = random.Random(seed)
    groups = draw_groups(rng)
    managers = make_block_managers(groups)
    index = PrefixIndex(managers, geometry=b"", grain_tokens=GRAIN)
    num_grains = rng.randint(1, 12)
    tokens = [rng.randrange(50) for _ in range(num_grains * GRAIN)]
    chain: list[tuple[bytes, bytes]] = []
    index.extend_chain(chain, tokens, num_grains, "")
    density = rng.choice([0.5, 0.8, 0.95, 1.0])
    stored: list[set[int]] = [set() for _ in groups]
    next_block = 0
    for number in range(num_grains):
        for group, manager in enumerate(managers):
            size = manager.block_tokens
            table = []
            for entry in range(GRAIN // size if manager.is_positional else 1):
                is_there = rng.random() < density
                table.append(next_block if is_there else NO_BLOCK)
                next_block += 1
                if is_there and manager.is_positional:
                    start = number * GRAIN + entry * size
                    stored[group].update(range(start, start + size))
                elif is_there:
                    stored[group].add((number + 1) * GRAIN)
            is_whole = NO_BLOCK not in table
            if any(b != NO_BLOCK for b in table) and (is_whole or not manager.needs_whole_prefix):
                assert index.register(chain, number, group, tuple(table))
            elif manager.is_positional:
                stored[group] -= set(range(number * GRAIN, (number + 1) * GRAIN))

    def resumes(position: int) -> bool:
        return all(
            position in stored[g]
            if isinstance(group.lifetime, State)
            else must_be_there(group, position) <= stored[g]
            for g, group in enumerate(groups)
        )

    max_tokens = rng.randint(0, num_grains * GRAIN)
    expected = max((p for p in range(GRAIN, max_tokens + 1, GRAIN) if resumes(p)), default=0)
    assert len(index.match([], tokens, max_tokens, "")) * GRAIN == expected


LIFETIMES = [
    *(Window(tokens=width, sinks=sinks) for width in range(1, 20) for sinks in (0, 1, 3)),
    *(Chunk(tokens=length) for length in range(1, 20)),
]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_one_missing_block_counts_only_where_it_is_seen(size):
    """Every window, chunk, position and block around every edge (traps 2, 11, 23)."""
    num_grains, per_grain = 4, GRAIN // size
    tokens = list(range(num_grains * GRAIN))
    chain: list[tuple[bytes, bytes]] = []
    for lifetime in LIFETIMES:
        group = token_group("x", lifetime, block_tokens=size)
        for missing in range(num_grains * per_grain):
            index = PrefixIndex(make_block_managers([group]), geometry=b"", grain_tokens=GRAIN)
            index.extend_chain(chain, tokens, num_grains, "")
            blocks = [NO_BLOCK if b == missing else b for b in range(num_grains * per_grain)]
            for number in range(num_grains):
                table = tuple(blocks[number * per_grain : (number + 1) * per_grain])
                if any(block != NO_BLOCK for block in table):
                    index.register(chain, number, 0, table)
            gone = set(range(missing * size, (missing + 1) * size))
            hit = 0
            for position in range(GRAIN, len(tokens) + 1, GRAIN):
                hit = hit if must_be_there(group, position) & gone else position
                found = len(index.match(chain, tokens, position, "")) * GRAIN
                assert found == hit, (lifetime, missing, position)


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_blocks_die_as_soon_as_nobody_sees_them(size):
    """Neither a step too early, nor one too late (traps 2, 3, 23)."""
    for lifetime in LIFETIMES:
        group = token_group("x", lifetime, block_tokens=size)
        (manager,) = make_block_managers([group])
        sinks = lifetime.sinks if isinstance(lifetime, Window) else 0
        assert manager.first_mortal_entry == -(-sinks // size)
        without_sinks = replace(group, lifetime=replace(lifetime, sinks=0)) if sinks else group
        for n in range(64):
            first_seen = min(must_be_there(without_sinks, n), default=n)
            assert manager.num_dead_entries(n) == first_seen // size, (lifetime, n)


def test_keys_depend_on_lifetimes_and_shapes():
    """Rows of another window, block size, shape or type are never taken for one's own (trap 31)."""
    base = token_group("x", Window(tokens=8))
    halved = CacheField(name="k", shape=(16,), dtype=DType.BFLOAT16)
    spec = LayerCacheSpec(layer=1, fields=(halved,), lifetime=Window(tokens=8), kind="x")
    others = [
        token_group("x", Window(tokens=9)),
        token_group("x", Window(tokens=8, sinks=1)),
        token_group("x", Chunk(tokens=8)),
        token_group("x", Window(tokens=8), block_tokens=8),
        token_group("x", Window(tokens=8), layer=2),
        replace(base, name="y"),
        make_group("x", [spec], 4),
        state_group("x"),
    ]
    keys = {describe_geometry([group]) for group in [base, *others]}
    assert len(keys) == 1 + len(others)


@pytest.mark.parametrize(
    "groups",
    [
        [token_group("w", Window(tokens=1))],
        [token_group("w", Window(tokens=1 << 20))],
        [token_group("w", Window(tokens=5, sinks=1000))],
        [token_group("c", Chunk(tokens=1))],
        [token_group("c", Chunk(tokens=1 << 20))],
        [state_group()],
        [state_group("a"), state_group("b", layer=3)],
        [full_group(), token_group("w", Window(tokens=3)), state_group()],
    ],
    ids=["w1", "wide", "sinks", "c1", "long", "state", "states", "three"],
)
def test_degenerate_mixes_run_at_every_chunk_size(groups):
    """W >= max_model_len, W = 1, no full layer, states only (trap 32); preempted at will (8)."""
    rng = random.Random(5)
    for budget in (1, 3, 7, 8, 64):
        config = scheduler_config(max_num_batched_tokens=budget, max_num_seqs=3)
        config = replace(config, enable_chunked_prefill=True)
        harness = Harness(groups, layout_of(groups, 200), config)
        requests = [
            make_request(str(i), [rng.randrange(3) for _ in range(rng.randint(1, 40))], n=1 + i % 2)
            for i in range(5)
        ]
        for request in requests:
            harness.scheduler.add(request)
        for _ in range(400):
            if not harness.scheduler.has_unfinished:
                break
            roster = harness.scheduler._roster
            if roster.running and rng.random() < 0.15:
                harness.scheduler._preempt(roster.running[-1])
            harness.step()
        harness.run()
        for request in requests:
            for branch in range(request.n):
                tokens = harness.tokens[request.request_id, branch]
                assert tokens == expected_tokens(request, branch, 128)
        harness.assert_drained()


def test_need_covers_every_step_of_every_chunking():
    """The peak that start-up proves is never exceeded, and hardly ever too large (trap 13)."""
    rng = random.Random(6)
    for _ in range(150):
        size = rng.choice([1, 2, 4, 16])
        width = rng.randint(1, 40)
        lifetime = rng.choice(
            [Window(tokens=width, sinks=rng.choice([0, 0, 5])), Chunk(tokens=width)]
        )
        (manager,) = make_block_managers([token_group("x", lifetime, block_tokens=size)])
        max_len = rng.randint(1, 90)
        max_chunk = rng.randint(1, max_len)
        worst = max(
            manager.need(n, q)
            for n in range(max_len)
            for q in range(1, min(max_chunk, max_len - n) + 1)
        )
        assert worst <= manager.peak_need(max_len, max_chunk) <= worst + 3


def test_a_row_that_failed_leaves_nothing_behind():
    """What a failed row has computed may be anything: nobody resumes from it."""
    groups = [full_group(), state_group()]
    harness = Harness(groups, layout_of(groups, 60), scheduler_config())
    harness.scheduler.add(make_request("a", range(40)))
    harness.executor.fail_rows = frozenset({0})
    harness.run()
    harness.executor.fail_rows = frozenset()
    harness.scheduler.add(make_request("b", range(40)))
    harness.run()
    assert {r.num_cached_tokens for r in harness.results if r.request_id == "b"} == {0}
    harness.assert_drained()
