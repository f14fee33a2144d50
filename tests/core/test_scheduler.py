"""The scheduler with a fake executor: right tokens, limits, ends, branches, aborts."""

from __future__ import annotations

import pytest

from tests.core.builders import expected_tokens, full_harness, make_request
from tests.utils.fake_executor import EOS
from vllm.errors import RequestError
from vllm.types import FinishReason


def assert_right(harness, requests) -> None:
    for request in requests:
        for branch in range(request.n):
            expected = expected_tokens(request, branch, harness.config.max_model_len)
            assert harness.tokens[request.request_id, branch] == expected
    harness.assert_drained()


def test_one_request_equals_the_unloaded_run():
    harness = full_harness()
    request = make_request("a", range(1, 11), max_tokens=20)
    harness.scheduler.add(request)
    harness.run()
    assert_right(harness, [request])
    assert harness.ends["a", 0] is FinishReason.LENGTH
    assert len(harness.plans) == 20


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [3, 16, 64])
def test_many_requests_in_any_chunks(chunk, overlap):
    harness = full_harness(max_num_batched_tokens=chunk, max_num_seqs=3)
    requests = [
        make_request(str(i), [i + j % 7 for j in range(5 + 9 * i)], max_tokens=10 + i, eos=EOS)
        for i in range(6)
    ]
    for request in requests:
        harness.scheduler.add(request)
    harness.run(overlap=overlap)
    assert_right(harness, requests)


def test_branches_share_the_prompt_and_copy_the_partial_block():
    harness = full_harness()
    request = make_request("a", range(1, 11), max_tokens=6, n=3)
    harness.scheduler.add(request)
    harness.step()
    assert harness.plans[-1].rows[0].num_samples == 3
    harness.step()
    plan = harness.plans[-1]
    assert len(plan.copies) == 2
    assert [new.branch for new in plan.new_rows] == [1, 2]
    tables = [new.block_ids[0] for new in plan.new_rows]
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2]
    harness.run()
    assert_right(harness, [request])


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_recomputes_and_changes_no_token(overlap):
    harness = full_harness(20, max_num_seqs=4, max_model_len=80)
    requests = [make_request(str(i), [i, 1, 2, 3, 4], max_tokens=50) for i in range(4)]
    for request in requests:
        harness.scheduler.add(request)
    harness.run(overlap=overlap)
    assert harness.scheduler.stats().num_preemptions > 0
    assert_right(harness, requests)


def test_branches_that_do_not_fit_together_are_queued():
    """Case C12: four requests of four branches in an arena that cannot hold one of them whole."""
    harness = full_harness(20, block_tokens=16, max_num_seqs=16, max_model_len=128)
    requests = [
        make_request(str(i), range(i, i + 20), max_tokens=100, n=4, seed=i) for i in range(4)
    ]
    for request in requests:
        harness.scheduler.add(request)
    harness.run()
    assert all(len(tokens) == 100 for tokens in harness.tokens.values())
    assert len(harness.ends) == 16
    assert harness.scheduler.stats().num_preemptions > 0
    assert_right(harness, requests)


def test_prefix_hit_skips_computed_blocks():
    harness = full_harness()
    first = make_request("a", range(1, 23), max_tokens=4)
    harness.scheduler.add(first)
    harness.run()
    second = make_request("b", [*range(1, 18), 40, 41, 42], max_tokens=4)
    harness.scheduler.add(second)
    harness.step()
    row = harness.plans[-1].rows[0]
    assert (row.num_computed_tokens, row.num_new_tokens) == (16, 4)
    assert harness.results[-1].num_cached_tokens == 16
    harness.run()
    assert_right(harness, [first, second])


@pytest.mark.parametrize("length", [4, 8, 9, 15, 16, 17])
def test_whole_prompt_in_cache_still_computes_a_token(length):
    harness = full_harness()
    for name in ("a", "b", "c"):
        request = make_request(name, range(1, length + 1), max_tokens=3)
        harness.scheduler.add(request)
        harness.run()
        assert harness.tokens[name, 0] == expected_tokens(request, 0, 128)
    assert harness.results[-1].num_cached_tokens == (length - 1) // 4 * 4
    harness.assert_drained()


def test_prompt_logprobs_ignore_the_cache_but_feed_it():
    """Case C06."""
    for length in (15, 16, 17, 31, 32, 33, 48):
        harness = full_harness(block_tokens=16, max_num_batched_tokens=20)
        seen = []
        for name in ("a", "b"):
            harness.scheduler.add(
                make_request(name, range(3, length + 3), max_tokens=1, prompt_logprobs=1)
            )
            harness.run()
            entries = [
                (r.prompt_start + i, e.token_ids[0], e.logprobs[0])
                for r in harness.results
                if r.request_id == name and r.prompt_logprobs
                for i, e in enumerate(r.prompt_logprobs)
            ]
            assert entries == [(p, 3 + p, -float(p)) for p in range(1, length)]
            seen.append(entries)
        assert seen[0] == seen[1]
        harness.scheduler.add(make_request("c", range(3, length + 3), max_tokens=1))
        harness.run()
        assert harness.results[-1].num_cached_tokens == (length - 1) // 16 * 16
        harness.assert_drained()


def test_what_can_never_be_served_is_refused_at_once():
    harness = full_harness(12, block_tokens=16, max_num_batched_tokens=512, max_model_len=512)
    scheduler = harness.scheduler
    with pytest.raises(RequestError, match=r"250 tokens.*empty"):
        scheduler.add(make_request("big", range(250)))
    with pytest.raises(RequestError, match=r"600 tokens.*512"):
        scheduler.add(make_request("long", range(600)))
    with pytest.raises(RequestError, match="no tokens"):
        scheduler.add(make_request("empty", []))
    with pytest.raises(RequestError, match=r"17.*16"):
        scheduler.add(make_request("wide", [1], n=17))
    good = make_request("good", range(8), max_tokens=8)
    scheduler.add(good)
    with pytest.raises(RequestError, match="already in use"):
        scheduler.add(good)
    harness.run()
    assert_right(harness, [good])


def test_ends_by_length_where_the_arena_is_smaller_than_max_model_len():
    """Case C11 with the start-up proof waived."""
    harness = full_harness(12, block_tokens=4, max_model_len=512)
    harness.scheduler.add(make_request("a", range(40), max_tokens=100))
    harness.scheduler.add(make_request("b", range(5), max_tokens=8))
    harness.run()
    assert harness.ends == {("a", 0): FinishReason.LENGTH, ("b", 0): FinishReason.LENGTH}
    assert len(harness.tokens["a", 0]) == 9
    assert len(harness.tokens["b", 0]) == 8
    harness.assert_drained()


def test_stop_conditions():
    base = make_request("x", [7, 8, 9], max_tokens=60, seed=3)
    free = expected_tokens(base, 0, 128)
    stop = free[4]
    first = free.index(stop)
    harness = full_harness()
    harness.scheduler.add(make_request("eos", [7, 8, 9], max_tokens=60, seed=3, eos=stop))
    harness.scheduler.add(
        make_request("id", [7, 8, 9], max_tokens=60, seed=3, stop_token_ids=(stop,))
    )
    harness.scheduler.add(
        make_request("min", [7, 8, 9], max_tokens=60, seed=3, eos=stop, min_tokens=first + 2)
    )
    harness.scheduler.add(make_request("long", [7, 8, 9], max_tokens=None, seed=3))
    harness.scheduler.add(make_request("full", range(128), max_tokens=None))
    harness.scheduler.add(make_request("none", [1, 2, 3], max_tokens=0))
    harness.run()
    assert harness.tokens["eos", 0] == harness.tokens["id", 0] == free[: first + 1]
    assert harness.ends["eos", 0] is harness.ends["id", 0] is FinishReason.STOP
    assert harness.stop_reasons["eos", 0] is None
    assert harness.stop_reasons["id", 0] == stop
    assert len(harness.tokens["min", 0]) >= first + 2
    assert len(harness.tokens["long", 0]) == 125
    assert len(harness.tokens["full", 0]) == 1
    assert harness.tokens["none", 0] == []
    assert harness.ends["none", 0] is FinishReason.LENGTH
    harness.assert_drained()


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_at_any_moment_frees_everything(overlap):
    for moment in range(12):
        harness = full_harness(24, max_num_batched_tokens=8, max_model_len=60)
        stay = make_request("stay", range(10), max_tokens=20)
        go = make_request("go", range(20, 33), max_tokens=20, n=2)
        harness.scheduler.add(go)
        harness.scheduler.add(stay)
        for _ in range(moment):
            harness.submit()
            if harness.num_tickets > int(overlap):
                harness.collect()
        assert harness.scheduler.abort("go")
        assert not harness.scheduler.abort("go")
        harness.run(overlap=overlap)
        assert harness.tokens["stay", 0] == expected_tokens(stay, 0, 60)
        harness.assert_drained()


def test_failed_row_ends_its_sequence_only():
    harness = full_harness()
    harness.scheduler.add(make_request("bad", [1, 2, 3]))
    good = make_request("good", [4, 5, 6])
    harness.scheduler.add(good)
    harness.executor.fail_rows = frozenset([0])
    harness.run()
    assert harness.ends["bad", 0] is FinishReason.ERROR
    assert harness.tokens["good", 0] == expected_tokens(good, 0, 128)
    harness.assert_drained()
