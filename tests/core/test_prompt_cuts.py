"""Where prompts are cut: not in the small rest that others leave of a step, else anywhere."""

from __future__ import annotations

import random

import pytest

from tests.core.builders import Harness, expected_tokens, full_harness, make_request
from vllm.sequence import SequenceRequest


def make_harness(budget: int, *, max_num_seqs: int = 16, **changes: object) -> Harness:
    return full_harness(
        400, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, max_model_len=400, **changes
    )


def make_prompt(name: int, length: int, *, max_tokens: int = 8) -> SequenceRequest:
    """A request whose prompt shares nothing with another's."""
    tokens = [(7 * name + i) % 50 for i in range(length)]
    return make_request(str(name), tokens, max_tokens=max_tokens, cache_salt=str(name))


def list_chunks(harness: Harness) -> list[list[int]]:
    """Lengths of the chunks of each step, decode rows left out."""
    return [[r.num_new_tokens for r in p.rows if r.num_new_tokens > 1] for p in harness.plans]


def serve(harness: Harness, requests: list[SequenceRequest], *, overlap: bool = False) -> None:
    for request in requests:
        harness.scheduler.add(request)
    harness.run(overlap=overlap)
    for request in requests:
        assert harness.tokens[request.request_id, 0] == expected_tokens(request, 0, 400)
    harness.assert_drained()


@pytest.mark.parametrize("overlap", [False, True])
def test_long_prompts_stay_whole_beside_decodes(overlap: bool) -> None:
    """One token for each sequence beside a prompt of 64: what the default on a GPU gives."""
    harness = make_harness(64 + 8, max_num_seqs=8)
    serve(harness, [make_prompt(i, 64) for i in range(8)], overlap=overlap)
    assert [c for c in list_chunks(harness) if c] == [[64]] * 8


def test_a_large_rest_is_used() -> None:
    harness = make_harness(64)
    serve(harness, [make_prompt(0, 56), make_prompt(1, 40)])
    assert list_chunks(harness)[:2] == [[56, 8], [32]]


def test_a_small_rest_takes_what_fits_whole() -> None:
    harness = make_harness(64)
    serve(harness, [make_prompt(0, 58), make_prompt(1, 6), make_prompt(2, 6)])
    assert list_chunks(harness)[:2] == [[58, 6], [6]]


def test_nobody_overtakes_a_prompt_that_waits_for_the_next_step() -> None:
    harness = make_harness(64)
    serve(harness, [make_prompt(0, 58), make_prompt(1, 30), make_prompt(2, 5)])
    assert list_chunks(harness)[:2] == [[58], [30, 5]]


def test_a_prompt_longer_than_a_step_uses_every_rest() -> None:
    harness = make_harness(64)
    serve(harness, [make_prompt(0, 60), make_prompt(1, 100)])
    assert list_chunks(harness)[:3] == [[60, 4], [63], [33]]


def test_decodes_never_keep_a_prompt_out() -> None:
    """They leave two tokens of 32, step after step."""
    harness = make_harness(32, max_num_seqs=31)
    for i in range(30):
        harness.scheduler.add(make_prompt(i, 2, max_tokens=60))
    while harness.scheduler.stats().num_running < 30:
        harness.step()
    num_steps = len(harness.plans)
    harness.scheduler.add(make_prompt(30, 12, max_tokens=3))
    while ("30", 0) not in harness.ends:
        harness.step()
    assert len(harness.plans) - num_steps == 6 + 2
    harness.run()
    harness.assert_drained()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_no_step_is_idle(seed: int, overlap: bool) -> None:
    """While somebody waits who finds seats and blocks, an eighth of a step is lost at most."""
    rng = random.Random(seed)
    budget = rng.choice([32, 64, 100])
    harness = make_harness(budget, max_num_seqs=64, caching=False)
    requests = [
        make_prompt(i, rng.randint(2, 150), max_tokens=rng.randint(1, 4)) for i in range(20)
    ]
    waiting: list[int] = []

    def note() -> None:
        waiting.append(harness.scheduler.stats().num_waiting)

    harness.on_step = note
    serve(harness, requests, overlap=overlap)
    left = [*waiting[1:], 0]
    for plan, num_left in zip(harness.plans, left, strict=True):
        if num_left:
            assert 8 * (budget - plan.num_tokens) < budget
