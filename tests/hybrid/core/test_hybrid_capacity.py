"""What hybrid caches hold: superblock waste, capacity that is really run, arenas that are full."""

from __future__ import annotations

import pytest

from tests.core.builders import make_request, scheduler_config
from tests.core.test_pressure import answer
from tests.hybrid.core.geometries import (
    GEOMETRIES,
    attention,
    delta_net,
    gemma3_4b,
    make_groups,
    qwen3_next_80b,
    repeat,
)
from vllm.cache_spec import Window
from vllm.core.cache_manager import CacheManager
from vllm.core.capacity import make_layout
from vllm.core.scheduler import Scheduler

GIB = 2**30


@pytest.mark.parametrize("name", GEOMETRIES)
def test_superblocks_waste_at_most_two_percent(name):
    groups = make_groups(GEOMETRIES[name]())
    layout, report = make_layout(
        [groups], [40 * GIB], max_model_len=8192, max_num_batched_tokens=2048
    )
    assert report.within_limits
    assert max(group.waste for group in report.groups) <= 0.02
    assert report.superblock_bytes <= 64 << 20
    assert layout.num_superblocks >= 64


def test_a_large_state_is_striped_over_layers():
    groups = make_groups(qwen3_next_80b())
    states = [group for group in groups if group.name.startswith("state")]
    assert len(states) == 2
    assert all(group.block_bytes <= 64 << 20 for group in states)
    assert sorted(layer for group in states for layer in group.layers) == [
        i for i in range(48) if (i + 1) % 4
    ]


def test_gemma3_4b_runs_24_sequences_of_32768_tokens_in_18_58_gib():
    """Windows are stored once W tokens long, so 25.2 would fit by arithmetic."""
    groups = make_groups(gemma3_4b())
    layout, report = make_layout(
        [groups], [int(18.58 * GIB)], max_model_len=32768, max_num_batched_tokens=8192
    )
    assert 24 <= report.max_concurrency <= 25.2
    cache = CacheManager(groups, layout, enable_prefix_caching=True)
    config = scheduler_config(max_num_batched_tokens=8192, max_num_seqs=64, max_model_len=32768)
    scheduler = Scheduler(config, cache)
    for number in range(24):
        scheduler.add(make_request(str(number), [number] * 32400, max_tokens=None))
    lengths: list[int] = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        if len(plan.rows) == 24:
            lengths.append(min(row.num_computed_tokens for row in plan.rows) + 1)
        scheduler.update(plan, answer(plan))
    assert max(lengths) > 32600  # all run at once, until the first reaches its end
    assert scheduler.stats().num_preemptions == 0
    assert scheduler.stats().num_generated_tokens == 24 * 368


@pytest.mark.parametrize(
    ("layers", "gib"),
    [
        (gemma3_4b(), 4),
        (repeat(24, 4, attention(2, 256), delta_net(16, 32, 128)), 3),
        ([*[attention(2, 256)] * 4, *[attention(2, 256, Window(tokens=512))] * 8], 1),
    ],
    ids=["windows", "states", "mixed"],
)
def test_running_requests_hold_95_percent_under_pressure(layers, gib):
    groups = make_groups(layers)
    layout, _ = make_layout(
        [groups], [int(gib * GIB)], max_model_len=8192, max_num_batched_tokens=4096
    )
    cache = CacheManager(groups, layout, enable_prefix_caching=True)
    config = scheduler_config(max_num_batched_tokens=4096, max_num_seqs=512, max_model_len=8192)
    scheduler = Scheduler(config, cache)
    num_asked = num_run = 0
    for number in range(220):
        length, max_tokens = 1100 + 137 * number % 1900, 150 + 11 * number % 450
        num_asked += length + max_tokens
        scheduler.add(make_request(str(number), [number] * length, max_tokens=max_tokens))
    held: list[float] = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        num_run += plan.num_tokens
        scheduler.update(plan, answer(plan))
        stats = scheduler.stats()
        if stats.num_waiting > 2 and (held or stats.cache_usage > 0.95):
            held.append(stats.cache_usage)
    assert len(held) > 50
    assert sum(held) / len(held) >= 0.95
    assert num_run < 1.3 * num_asked
    assert cache.usage == 0
