"""Two steps on their way: what may be planned before a token is back, and what must wait."""

from __future__ import annotations

import random

import pytest

from tests.core.builders import expected_tokens, full_harness, make_request
from tests.core.late_outputs import LateSchedule
from tests.core.test_random_schedules import draw_harness
from tests.utils.fake_executor import EOS, generate
from vllm.types import FinishReason

NUM_RANDOM_STEPS = 500


def rows_of(plan) -> list[int]:
    return [row.seq_id for row in plan.rows]


def test_the_next_token_is_planned_before_the_last_is_known():
    harness = full_harness()
    harness.scheduler.add(make_request("a", [1, 2, 3], max_tokens=6))
    first, second = harness.submit(), harness.submit()
    assert rows_of(first) == rows_of(second) == [0]
    assert second.rows[0].num_computed_tokens == 3
    harness.run(overlap=True)
    assert harness.tokens["a", 0] == expected_tokens(
        make_request("a", [1, 2, 3], max_tokens=6), 0, 99
    )


def test_no_token_beyond_a_known_end_is_computed():
    harness = full_harness()
    request = make_request("a", [1, 2, 3], max_tokens=6)
    harness.scheduler.add(request)
    harness.run(overlap=True)
    assert harness.executor.num_rows_run == 6


def test_an_over_run_is_dropped_and_its_blocks_come_back_with_it():
    length = next(
        n for n in range(1, 40)
        if EOS in generate([n, 2, 3], branch=0, seed=0, max_tokens=20)
    )  # fmt: skip
    request = make_request("a", [length, 2, 3], max_tokens=40, eos=EOS)
    expected = expected_tokens(request, 0, 128)
    harness = full_harness()
    harness.scheduler.add(request)
    while ("a", 0) not in harness.ends:
        if harness.num_tickets < 2:
            harness.submit()
        else:
            harness.collect()
    assert harness.tokens["a", 0] == expected
    assert harness.ends["a", 0] is FinishReason.STOP
    if harness.num_tickets:  # a step with the row still runs: the blocks must not be given away
        assert harness.cache.usage > 0
        harness.collect()
    assert harness.cache.usage == 0
    assert harness.tokens["a", 0] == expected
    assert harness.executor.num_rows_run == len(expected) + 1
    harness.assert_drained()


def test_no_step_is_planned_while_the_host_must_see_a_token():
    harness = full_harness()
    harness.scheduler.add(make_request("free", [1, 2, 3], max_tokens=9))
    harness.scheduler.add(make_request("bound", [4, 5, 6], max_tokens=3, needs_host_token=True))
    for _ in range(2):
        assert rows_of(harness.submit()) == [0, 1]
        assert harness.submit().is_empty
        harness.collect()
    assert rows_of(harness.submit()) == [0, 1]
    assert rows_of(harness.submit()) == [0], "the last token of the bound one is known to be that"
    harness.run(overlap=True)
    assert len(harness.tokens["bound", 0]) == 3
    assert len(harness.tokens["free", 0]) == 9


def test_a_prompt_of_several_steps_overlaps_until_its_first_token():
    harness = full_harness(max_num_batched_tokens=4)
    harness.scheduler.add(make_request("a", range(10), max_tokens=3, needs_host_token=True))
    first, second = harness.submit(), harness.submit()
    assert [plan.rows[0].num_new_tokens for plan in (first, second)] == [4, 4]
    harness.collect()
    assert harness.submit().rows[0].num_samples == 1
    harness.collect()
    assert harness.submit().is_empty


def test_only_as_many_steps_as_allowed_are_planned():
    harness = full_harness(max_steps_in_flight=1)
    harness.scheduler.add(make_request("a", [1, 2, 3]))
    harness.submit()
    with pytest.raises(AssertionError, match="must return"):
        harness.submit()


def test_a_request_that_forks_waits_for_its_branches():
    harness = full_harness()
    harness.scheduler.add(make_request("a", [1, 2, 3, 4], max_tokens=5, n=3))
    assert rows_of(harness.submit()) == [0]
    assert harness.submit().is_empty
    harness.collect()
    assert sorted(rows_of(harness.submit())) == [0, 1, 2]
    harness.run(overlap=True)
    assert all(len(tokens) == 5 for tokens in harness.tokens.values())


def test_one_place_is_taken_where_one_is_enough_although_its_blocks_come_later():
    harness = full_harness(12, max_num_seqs=4, max_model_len=40)
    for number in range(3):
        harness.scheduler.add(make_request(str(number), [number, 1, 2, 3, 4, 5], max_tokens=20))
    while harness.scheduler.stats().num_preemptions == 0:
        if harness.num_tickets < 2:
            harness.submit()
        else:
            harness.collect()
    # Two blocks of the victim are enough for both others; the step with the victim is not back yet.
    assert harness.num_tickets == 2
    assert harness.plans[-1].dropped == [2]
    assert rows_of(harness.plans[-1]) == []
    harness.run(overlap=True)
    assert harness.scheduler.stats().num_preemptions <= 2
    for number in range(3):
        request = make_request(str(number), [number, 1, 2, 3, 4, 5], max_tokens=20)
        assert harness.tokens[str(number), 0] == expected_tokens(request, 0, 40)


def test_a_sequence_alone_at_capacity_still_gets_the_token_on_its_way():
    tokens = []
    for overlap in (False, True):
        harness = full_harness(3, max_model_len=512)
        harness.scheduler.add(make_request("a", range(5), max_tokens=100))
        harness.run(overlap=overlap)
        assert harness.ends["a", 0] is FinishReason.LENGTH
        tokens.append(harness.tokens["a", 0])
        harness.assert_drained()
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 8


def test_an_end_that_the_host_finds_late_drops_what_still_runs():
    """A stop string is found by the text side, when the next step runs already."""
    harness = full_harness(max_num_seqs=4)
    harness.scheduler.add(make_request("a", [1, 2, 3], max_tokens=20, n=2))
    while len(harness.tokens["a", 1]) < 3:
        if harness.num_tickets < 2 and not harness.submit().is_empty:
            continue
        harness.collect()
    num_tokens = len(harness.tokens["a", 1])
    assert harness.num_tickets == 1
    assert harness.scheduler.abort_branch("a", 1)
    harness.run(overlap=True)
    assert len(harness.tokens["a", 1]) == num_tokens
    assert harness.tokens["a", 0] == expected_tokens(
        make_request("a", [1, 2, 3], max_tokens=20), 0, 128
    )
    harness.assert_drained()


def test_blocks_are_published_with_known_tokens_only():
    harness = full_harness(block_tokens=4)
    harness.scheduler.add(make_request("a", [1, 2, 3], max_tokens=9))
    harness.submit()
    harness.submit()
    harness.collect()
    # The second step fills the first block; its last token has just come, the block is still
    # being written and nobody may find it.
    (state,) = harness.scheduler._roster.requests.values()
    (sequence,) = state.sequences
    assert sequence.num_computed_tokens == 4
    assert harness.cache.match(sequence.cache, [*sequence.token_ids, 9], 4).num_tokens == 0
    harness.collect()
    assert harness.cache.match(sequence.cache, [*sequence.token_ids, 9], 4).num_tokens == 4
    harness.run(overlap=True)
    harness.assert_drained()


@pytest.mark.parametrize("seed", range(8))
def test_random_steps_whose_outputs_come_late(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(f"late {seed}")
    harness, max_len = draw_harness(rng)
    LateSchedule(harness, rng, max_len).run(NUM_RANDOM_STEPS)
