"""Checkpoints one by one: who writes them, what becomes of them, and what must never be one."""

from __future__ import annotations

import pytest

from tests.core.builders import (
    Harness,
    expected_tokens,
    full_group,
    layout_of,
    make_request,
    scheduler_config,
)
from tests.hybrid.core.shapes import state_group, token_group
from vllm.cache_spec import Window


def make_harness(groups, num_superblocks=80, **changes):
    return Harness(groups, layout_of(groups, num_superblocks), scheduler_config(**changes))


def serve(harness, request, *, overlap=False):
    """Run one more request to its end; return its cached tokens."""
    harness.scheduler.add(request)
    harness.run(overlap=overlap)
    for branch in range(request.n):
        expected = expected_tokens(request, branch, harness.config.max_model_len)
        assert harness.tokens[request.request_id, branch] == expected
    return max(r.num_cached_tokens for r in harness.results if r.request_id == request.request_id)


@pytest.mark.parametrize("overlap", [False, True])
def test_states_alone_resume_at_the_end_of_a_turn(overlap):
    """No block edge brings the sequence to the slow path where a copy is wanted."""
    harness = make_harness([state_group()])
    assert serve(harness, make_request("a", range(10), max_tokens=40), overlap=overlap) == 0
    history = [*range(10), *harness.tokens["a", 0]]
    # 49 tokens were computed; the last checkpoint is at 48.
    assert serve(harness, make_request("b", [*history, 1, 2, 3]), overlap=overlap) == 48
    harness.assert_drained()


@pytest.mark.parametrize("overlap", [False, True])
def test_windows_keep_the_rows_before_a_fork_that_a_long_step_passes(overlap):
    """Also when the next step is planned before the rows are published."""
    groups = [full_group(), token_group("w", Window(tokens=8))]
    harness = make_harness(groups)
    shared = list(range(24))
    serve(harness, make_request("a", [*shared, *[7] * 30], max_tokens=3), overlap=overlap)
    assert serve(harness, make_request("b", [*shared, *[8] * 30]), overlap=overlap) == 0
    assert serve(harness, make_request("c", [*shared, *[9] * 30]), overlap=overlap) == 24
    assert serve(harness, make_request("d", [*shared, *[9] * 30, 1]), overlap=overlap) >= 48
    harness.assert_drained()


def test_a_branch_that_ends_before_its_copy_leaves_no_checkpoint():
    """Its block has no content: the copy from its parent was never made."""
    harness = make_harness([full_group(), state_group()])
    prompt = [(3 * i) % 50 for i in range(16)]
    serve(harness, make_request("a", prompt, max_tokens=1, n=3))
    serve(harness, make_request("b", [*prompt, *range(10)]))
    harness.assert_drained()


def test_branches_take_copies_of_the_state():
    """Four branches cost one prompt (and their own tokens), not four."""
    harness = make_harness([full_group(), state_group()])
    serve(harness, make_request("a", range(40), max_tokens=6, n=4))
    assert harness.executor.num_tokens_run == 40 + 4 * 5
    harness.assert_drained()


def test_branches_without_room_for_copies_are_recomputed():
    harness = make_harness([state_group()], num_superblocks=2, max_num_seqs=4)
    serve(harness, make_request("a", range(20), max_tokens=6, n=4))
    harness.assert_drained()


def test_a_sequence_that_generates_keeps_one_copy_of_its_own():
    """Each new copy takes the place of the last, unless somebody has resumed from that."""
    harness = make_harness([state_group()])
    first = make_request("a", range(5), max_tokens=100, seed=1)
    harness.scheduler.add(first)
    for _ in range(56):
        harness.step()
    arena = harness.cache.arena
    assert arena.num_held_blocks(0) + arena.num_cached_blocks(0) == 2
    sequence = harness.scheduler._roster.running[0]
    position, blocks = sequence.cache.trail.newest
    harness.scheduler.add(make_request("b", [*sequence.token_ids[:position], 1, 2], max_tokens=1))
    harness.run()
    assert next(r for r in harness.results if r.request_id == "b").num_cached_tokens == position
    assert harness.cache._index.has_entry(0, blocks[0]), "b has resumed from it: it stays"
    harness.assert_drained()


def test_no_copy_waits_for_room():
    """In an arena of one state nothing can be copied, and everything still runs (trap 12)."""
    harness = make_harness([state_group()], num_superblocks=1)
    for name in "abc":
        serve(harness, make_request(name, range(30), max_tokens=20))
    assert not any(copy for plan in harness.plans for copy in plan.copies)
    assert harness.scheduler.stats().num_preemptions == 0
    harness.assert_drained()


def test_a_copy_that_can_no_longer_be_listed_is_given_back():
    """The cache is reset after the copy was planned and before its key is known (trap 34)."""
    harness = make_harness([state_group()])
    harness.scheduler.add(make_request("a", range(5), max_tokens=40))
    sequence = None
    while sequence is None or not sequence.cache.trail.unlisted:
        if harness.num_tickets == 2:
            harness.collect()
        harness.submit()
        (sequence,) = harness.scheduler._roster.running
    harness.cache.reset_prefix_cache()
    harness.run(overlap=True)
    harness.assert_drained()


def test_two_equal_prompts_in_one_step_and_in_the_next():
    """A state written in a step is not resumed from in the same step (trap 7)."""
    for overlap in (False, True):
        harness = make_harness([full_group(), state_group()], max_num_batched_tokens=200)
        prompt = [(5 * i) % 50 for i in range(30)]
        requests = [make_request(name, prompt) for name in "abcd"]
        harness.scheduler.add(requests[0])
        harness.scheduler.add(requests[1])
        harness.submit()
        harness.scheduler.add(requests[2])
        if not overlap:
            harness.collect()
        harness.submit()
        harness.scheduler.add(requests[3])
        harness.run(overlap=overlap)
        for request in requests:
            assert harness.tokens[request.request_id, 0] == expected_tokens(request, 0, 128)
        harness.assert_drained()
