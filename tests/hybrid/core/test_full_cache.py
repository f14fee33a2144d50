"""A full cache, as every server has after a while, is planned as fast as an empty one."""

from __future__ import annotations

import os
import random
import statistics
import time
from itertools import count

import pytest

from tests.core.builders import make_request, scheduler_config
from tests.core.test_pressure import answer
from tests.hybrid.core.geometries import GEOMETRIES, make_groups
from vllm.core.cache_manager import CacheManager
from vllm.core.capacity import make_layout
from vllm.core.prefix_history import PrefixHistory
from vllm.core.scheduler import Scheduler

NUM_ROUNDS = 3
MOST_TIMES = 8  # what each step looks at does not grow with the cache; it was 20 to 120 times


def make_engine(name: str, num_gib: int) -> tuple[CacheManager, Scheduler]:
    groups = make_groups(GEOMETRIES[name]())
    layout, _ = make_layout(
        [groups], [num_gib << 30], max_model_len=32768, max_num_batched_tokens=8192
    )
    cache = CacheManager(groups, layout, enable_prefix_caching=True)
    config = scheduler_config(max_num_batched_tokens=8192, max_num_seqs=64, max_model_len=32768)
    return cache, Scheduler(config, cache)


@pytest.mark.parametrize(
    ("name", "num_gib", "num_in"),
    [
        ("gemma3-4b", 18, 512),
        ("qwen3-next-small", 20, 512),
        ("nemotron-h-8b", 24, 512),
        ("qwen2-hybrid", 30, 4096),
        ("qwen2-7b", 6, 512),
    ],
)
def test_planning_in_a_full_cache(name: str, num_gib: int, num_in: int) -> None:
    """Rounds of 64 requests; the best round in the full cache beside the best before it."""
    cache, scheduler = make_engine(name, num_gib)
    rng, numbers = random.Random(0), count()

    def run_round() -> float:
        for _ in range(64):
            prompt = rng.choices(range(100000), k=num_in)
            scheduler.add(make_request(str(next(numbers)), prompt, max_tokens=128))
        took_s = 0.0
        while scheduler.has_unfinished:
            start_s = time.perf_counter()
            plan = scheduler.schedule()
            took_s += time.perf_counter() - start_s
            if plan.is_empty:
                scheduler.take_results()
            else:
                scheduler.update(plan, answer(plan))
        return took_s

    empty_s = [run_round()]
    most_cached = 0
    while (cached := sum(g.num_cached_blocks for g in cache.group_usage())) > 1.2 * most_cached:
        most_cached = cached
        empty_s.append(run_round())
    full_s = [run_round() for _ in range(NUM_ROUNDS)]
    assert min(full_s) < MOST_TIMES * min(empty_s), (empty_s, full_s)


def test_a_full_history_takes_note_as_fast_as_an_empty_one() -> None:
    history = PrefixHistory(max_digests=1 << 15)

    def note() -> float:
        chain = [(os.urandom(32), b"") for _ in range(1000)]
        start_s = time.perf_counter()
        history.note(chain)
        return time.perf_counter() - start_s

    empty_s = statistics.median(note() for _ in range(30))
    full_s = statistics.median(note() for _ in range(30))
    assert full_s < MOST_TIMES * empty_s


def test_a_full_history_forgets_what_was_seen_longest_ago() -> None:
    history = PrefixHistory(max_digests=3)
    a, b, c, d = ([(name, b"")] for name in (b"a", b"b", b"c", b"d"))
    for chain in (a, b, c, a, d):
        history.note(chain)
    assert [history.match(chain, 1) for chain in (a, b, c, d)] == [1, 0, 1, 1]
