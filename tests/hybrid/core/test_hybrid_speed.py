"""Planning stays cheap with several groups: rows that cross no block edge cost next to nothing."""

from __future__ import annotations

import math
import random
import time

from tests.core.builders import make_request, scheduler_config
from tests.core.test_pressure import answer
from tests.hybrid.core.geometries import attention, delta_net, make_groups
from vllm.cache_spec import Window
from vllm.core.cache_manager import CacheManager
from vllm.core.capacity import make_layout
from vllm.core.scheduler import Scheduler

_MOST_BATCHES = 8


def test_256_decoding_requests_with_three_groups_take_under_a_millisecond():
    """schedule() + update(); the median of a batch of steps, the best of up to eight batches.

    Other processes share the machine: the best batch is the least disturbed one.
    """
    layers = [
        *[attention(2, 256)] * 4,
        *[attention(2, 256, Window(tokens=512))] * 4,
        *[delta_net(16, 32, 128)] * 4,
    ]
    groups = make_groups(layers)
    assert len(groups) == 3
    layout, _ = make_layout([groups], [60 << 30], max_model_len=8192, max_num_batched_tokens=8192)
    cache = CacheManager(groups, layout, enable_prefix_caching=True)
    scheduler = Scheduler(
        scheduler_config(max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=8192), cache
    )
    rng = random.Random(0)
    for number in range(256):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(100, 700))]
        scheduler.add(make_request(str(number), prompt, max_tokens=2000))
    while scheduler.stats().num_running < 256 or scheduler._roster.prefilling:
        plan = scheduler.schedule()
        scheduler.update(plan, answer(plan))
    medians = [math.inf]
    while min(medians) >= 1e-3 and len(medians) <= _MOST_BATCHES:
        times = []
        for _ in range(96):
            start = time.perf_counter()
            plan = scheduler.schedule()
            planned = time.perf_counter() - start
            output = answer(plan)
            start = time.perf_counter()
            scheduler.update(plan, output)
            times.append(planned + time.perf_counter() - start)
            assert len(plan.rows) == 256
        medians.append(sorted(times)[48])
    assert min(medians) < 1e-3, medians
