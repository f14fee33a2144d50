"""How many requests that share a prefix find it, on the geometries of published hybrid models."""

from __future__ import annotations

import random

import pytest

from tests.core.builders import make_request, scheduler_config
from tests.core.test_pressure import answer
from tests.hybrid.core.geometries import Layer, gemma3_4b, make_groups, qwen3_next_80b
from vllm.core.cache_manager import CacheManager
from vllm.core.capacity import make_layout
from vllm.core.scheduler import Scheduler
from vllm.step import StepPlan

NUM_REQUESTS = 64


class Engine:
    """A scheduler over the cache of a real geometry, with a model that always says 5."""

    def __init__(self, layers: list[Layer], cache_bytes: float, budget: int) -> None:
        groups = make_groups(layers)
        layout, self.report = make_layout(
            [groups], [int(cache_bytes)], max_model_len=4096, max_num_batched_tokens=budget
        )
        self.cache = CacheManager(groups, layout, enable_prefix_caching=True)
        config = scheduler_config(
            max_num_batched_tokens=budget, max_num_seqs=64, max_model_len=4096
        )
        self.scheduler = Scheduler(config, self.cache)
        self.plans: list[StepPlan] = []
        self._number = 0

    def serve(self, prompts: list[list[int]], max_tokens: int = 8) -> list[int]:
        """Run prompts together to their ends; return the cached tokens of each."""
        for prompt in prompts:
            self._number += 1
            self.scheduler.add(make_request(str(self._number), prompt, max_tokens=max_tokens))
        states = list(self.scheduler._roster.requests.values())
        while self.scheduler.has_unfinished:
            plan = self.scheduler.schedule()
            self.plans.append(plan)
            if plan.is_empty:
                self.scheduler.take_results()
            else:
                self.scheduler.update(plan, answer(plan))
        return [state.num_cached_tokens for state in states]


def count_hits(engine: Engine, *, shared: int, own: int, burst: int = 1) -> int:
    """Serve requests that share a prefix in bursts; return how many found all of it."""
    rng = random.Random(0)
    prefix = [rng.randrange(1000) for _ in range(shared)]
    hits = 0
    for _ in range(NUM_REQUESTS // burst):
        prompts = [prefix + [rng.randrange(1000) for _ in range(own)] for _ in range(burst)]
        hits += sum(cached >= shared // 64 * 64 for cached in engine.serve(prompts))
    return hits


@pytest.mark.parametrize("gib", [8, 1.5])
def test_one_after_another_on_states(gib):
    """One request is cold and the second finds the fork; an arena for few of them is enough."""
    engine = Engine(qwen3_next_80b(), gib * 2**30, 2048)
    assert count_hits(engine, shared=1500, own=700) >= 62


@pytest.mark.parametrize("gib", [4, 0.5])
def test_one_after_another_on_windows_with_a_large_step(gib):
    """A step of 8,192 tokens stores the rows before the fork although the window has passed it."""
    engine = Engine(gemma3_4b(), gib * 2**30, 8192)
    assert count_hits(engine, shared=1500, own=700) >= 62


@pytest.mark.parametrize("budget", [2048, 8192, 32768])
@pytest.mark.parametrize("layers", [qwen3_next_80b, gemma3_4b])
def test_bursts_of_eight(layers, budget):
    assert count_hits(Engine(layers(), 2**33, budget), shared=1500, own=700, burst=8) >= 48


@pytest.mark.parametrize("layers", [qwen3_next_80b, gemma3_4b])
def test_a_short_shared_prefix(layers):
    engine = Engine(layers(), 2**32, 4096)
    assert count_hits(engine, shared=300, own=700) >= 62


@pytest.mark.parametrize("num_output", [1, 20, 64, 65, 200, 500])
@pytest.mark.parametrize("layers", [qwen3_next_80b, gemma3_4b])
def test_a_second_turn_resumes_at_the_end_of_the_first(layers, num_output):
    rng = random.Random(1)
    engine = Engine(layers(), 2**32, 4096)
    history = [rng.randrange(1000) for _ in range(1300)]
    for _ in range(3):
        engine.serve([history], max_tokens=num_output)
        # The last token was never an input; what came before it is in the cache.
        num_computed = len(history) + num_output - 1
        history = history + [5] * num_output + [rng.randrange(1000) for _ in range(90)]
        assert engine.serve([history], max_tokens=1) == [num_computed // 64 * 64]
        history.append(5)


def test_an_identical_prompt_leaves_a_token_to_compute():
    """A hit is at most n-1, and states resume exactly there (trap 9)."""
    for length in (127, 128, 129, 192, 193):
        engine = Engine(qwen3_next_80b(), 2**32, 4096)
        prompt = list(range(length))
        first, second, third = (engine.serve([prompt])[0] for _ in range(3))
        assert (first, second, third) == (0, (length - 1) // 64 * 64, (length - 1) // 64 * 64)


def test_a_chunk_is_cut_only_for_a_checkpoint_that_is_missing():
    """Of a burst one request is cut at the fork; later ones are not cut there at all."""
    engine = Engine(qwen3_next_80b(), 2**33, 32768)
    rng = random.Random(2)
    prefix = [rng.randrange(1000) for _ in range(640)]
    prompts = [prefix + [rng.randrange(1000) for _ in range(200)] for _ in range(8)]
    engine.serve(prompts[:6])
    ends = [row.num_computed_tokens + row.num_new_tokens for p in engine.plans for row in p.rows]
    assert ends.count(640) == 1
    engine.plans.clear()
    assert engine.serve(prompts[6:]) == [640, 640]
    ends = [row.num_computed_tokens + row.num_new_tokens for p in engine.plans for row in p.rows]
    assert 640 not in ends
