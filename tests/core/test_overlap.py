"""Two steps on their way: what may be planned before a token is back, and what must wait."""

from __future__ import annotations

from tests.core.builders import expected_tokens, full_harness, make_request
from tests.utils.fake_executor import EOS, generate
from vllm.types import FinishReason


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


def test_rows_whose_token_the_host_must_see_wait():
    harness = full_harness()
    harness.scheduler.add(make_request("free", [1, 2, 3], max_tokens=6))
    harness.scheduler.add(make_request("bound", [4, 5, 6], max_tokens=6, needs_host_token=True))
    assert rows_of(harness.submit()) == [0, 1]
    assert rows_of(harness.submit()) == [0]
    harness.collect()
    assert rows_of(harness.submit()) == [0, 1]
    harness.run(overlap=True)
    assert len(harness.tokens["bound", 0]) == 6


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
