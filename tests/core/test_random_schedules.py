"""Random schedules (H4): whatever comes together, every branch gets the tokens of the unloaded run.

Each case is drawn from its seed alone; a failure prints the seed. After every call all counts are
recomputed from scratch, and the drained arena must equal the first one.
"""

from __future__ import annotations

import random

import pytest

from tests.core.builders import (
    Harness,
    expected_tokens,
    full_group,
    layout_of,
    make_request,
    scheduler_config,
)
from tests.core.invariants import check_scheduler
from tests.utils.fake_executor import EOS
from vllm.core.block.table import make_block_managers
from vllm.core.need import count_superblocks, peak_blocks
from vllm.errors import RequestError
from vllm.sequence import Sequence, SequenceRequest, SequenceStatus
from vllm.types import FinishReason

NUM_SEEDS = 120


def draw_harness(rng: random.Random) -> tuple[Harness, int]:
    """A random engine; returns it and its max_model_len."""
    max_len = rng.choice([24, 40, 60])
    shape = rng.choice(["one", "one", "packed", "two", "two"])
    if shape == "one":
        groups, per = [full_group(block_tokens=rng.choice([1, 2, 4, 16]))], [1]
    elif shape == "packed":
        groups, per = [full_group(block_tokens=4)], [rng.choice([2, 3, 5])]
    else:
        groups = [full_group("a", block_tokens=4), full_group("b", block_tokens=8, layers=(1,))]
        per = [rng.choice([1, 3, 6]), rng.choice([1, 2, 4])]
    needs = peak_blocks(make_block_managers(groups), max_len, max_len)
    least = count_superblocks(needs, per)
    # From one short of what one full-length request needs to plenty.
    size = rng.choice([least - 1, least, least, least + 1, 2 * least, 4 * least])
    chunked = rng.random() < 0.8
    config = scheduler_config(
        max_num_batched_tokens=rng.choice([8, 16, 64]) if chunked else max(32, max_len),
        max_num_seqs=rng.choice([2, 4, 8]),
        max_model_len=max_len,
        enable_chunked_prefill=chunked,
        policy=rng.choice(["fcfs", "fcfs", "priority"]),
    )
    layout = layout_of(groups, max(1, size), per)
    return Harness(groups, layout, config, rng.random() < 0.8), max_len


def draw_request(rng: random.Random, number: int, max_len: int) -> SequenceRequest:
    """A random request; prompts share prefixes often."""
    stem = rng.choice([0, 1])
    length = rng.randint(1, max_len)
    prompt = [(stem + i * i) % 50 for i in range(length)]
    for _ in range(rng.choice([0, 0, 1])):
        prompt[rng.randrange(length)] = 7
    return make_request(
        f"r{number}",
        prompt,
        max_tokens=rng.choice([0, 1, 5, 20, None]),
        seed=rng.choice([0, 0, number]),
        eos=EOS if rng.random() < 0.5 else None,
        n=rng.choice([1, 1, 1, 2, 3]),
        priority=rng.choice([0, 0, 1, -1]),
        cache_salt=rng.choice(["", "", "salt"]),
        prompt_logprobs=1 if rng.random() < 0.15 else None,
        needs_host_token=rng.random() < 0.2,
    )


def check_outputs(harness: Harness, request: SequenceRequest, *, proven: bool) -> None:
    """Every branch has the right tokens; without the start-up proof it may be cut short."""
    for branch in range(request.n):
        key = (request.request_id, branch)
        if request.max_tokens == 0 and branch:
            continue
        expected = expected_tokens(request, branch, harness.config.max_model_len)
        tokens = harness.tokens[key]
        if tokens != expected:
            assert not proven, f"{key}: {tokens} is not {expected}"
            assert tokens == expected[: len(tokens)]
            assert harness.ends[key] is FinishReason.LENGTH
        assert key in harness.ends


def check_prompt_logprobs(harness: Harness, request: SequenceRequest) -> None:
    """Each prompt position but the first is reported once, in order, for one branch."""
    positions = [
        result.prompt_start + i
        for result in harness.results
        if result.request_id == request.request_id and result.prompt_logprobs
        for i in range(len(result.prompt_logprobs))
    ]
    wanted = request.sampling.num_prompt_logprobs is not None
    assert positions == (list(range(1, len(request.prompt_token_ids))) if wanted else [])


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_schedule(seed: int) -> None:
    rng = random.Random(seed)
    harness, max_len = draw_harness(rng)
    scheduler = harness.scheduler
    overlap = rng.random() < 0.5
    needs = peak_blocks(harness.cache._managers, max_len, max_len)
    per = harness.cache.arena.blocks_per_superblock
    proven = count_superblocks(needs, per) <= harness.layout.num_superblocks
    alive: dict[str, SequenceRequest] = {}
    done: list[SequenceRequest] = []
    watched: dict[int, Sequence] = {}
    number = 0

    def check() -> None:
        watched.update((s.seq_id, s) for s in scheduler._roster.running)
        ended = [
            s for s in watched.values() if s.status is SequenceStatus.FINISHED and s.num_in_flight
        ]
        check_scheduler(harness, ended)

    for _ in range(rng.randint(20, 60)):
        for _ in range(rng.choice([0, 0, 1, 2])):
            request = draw_request(rng, number, max_len)
            number += 1
            try:
                scheduler.add(request)
            except RequestError:
                assert (
                    request.n > harness.config.max_num_seqs
                    or not proven
                    or (len(request.prompt_token_ids) > harness.config.max_num_batched_tokens)
                )
                continue
            alive[request.request_id] = request
        if alive and rng.random() < 0.1:
            name = rng.choice(list(alive))
            states = scheduler._roster.requests
            if name in states:
                watched.update((s.seq_id, s) for s in states[name].sequences)
            scheduler.abort(name)
            del alive[name]
        if rng.random() < 0.02:
            harness.cache.reset_prefix_cache()
        advance(harness, rng, overlap=overlap)
        check()
    done += alive.values()
    harness.on_step = check
    harness.run(overlap=overlap)
    check_scheduler(harness, [])
    for request in done:
        check_outputs(harness, request, proven=proven)
        check_prompt_logprobs(harness, request)
    harness.assert_drained()


def advance(harness: Harness, rng: random.Random, *, overlap: bool) -> None:
    """Plan a step or take one in; with overlap up to two are on their way."""
    if harness.num_tickets and (not overlap or harness.num_tickets == 2 or rng.random() < 0.5):
        harness.collect()
    else:
        harness.submit()
