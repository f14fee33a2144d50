"""Order of requests: fcfs, priority with preemption, delay of new prompts, whole prompts."""

from __future__ import annotations

import msgspec
import pytest

from tests.core.builders import (
    expected_tokens,
    full_group,
    full_harness,
    layout_of,
    make_request,
    scheduler_config,
)
from tests.utils.fake_executor import FakeExecutor
from vllm.core.cache_manager import CacheManager
from vllm.core.policy import PromptDelay, make_policy
from vllm.core.scheduler import Scheduler
from vllm.errors import ConfigError


def first_steps(harness) -> list[int]:
    """Sequence ids in the order in which they first entered a step."""
    names = {}
    for plan in harness.plans:
        for new in plan.new_rows:
            names.setdefault(new.seq_id, None)
    return list(names)


def test_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match=r"'lifo' is unknown.*fcfs"):
        make_policy("lifo")


def test_fcfs_ignores_priority():
    harness = full_harness(max_num_seqs=1)
    for number, priority in enumerate([5, 1, 3]):
        harness.scheduler.add(
            make_request(str(number), [number + 1], max_tokens=3, priority=priority)
        )
    harness.run()
    assert first_steps(harness) == [0, 1, 2]
    assert harness.scheduler.stats().num_preemptions == 0


def test_priority_orders_the_waiting_and_ties_go_by_arrival():
    harness = full_harness(max_num_seqs=1, policy="priority")
    for number, priority in enumerate([5, 1, 3, 1]):
        harness.scheduler.add(
            make_request(str(number), [number + 1], max_tokens=3, priority=priority)
        )
    harness.run()
    assert first_steps(harness) == [1, 3, 2, 0]


@pytest.mark.parametrize("scarce", ["seats", "blocks"])
def test_a_better_request_takes_the_place_of_the_worst_running_one(scarce):
    if scarce == "seats":
        harness = full_harness(max_num_seqs=2, policy="priority")
    else:
        harness = full_harness(14, policy="priority", max_model_len=48)
    low = make_request("low", range(1, 17), max_tokens=12, priority=2)
    middle = make_request("middle", range(2, 18), max_tokens=12, priority=1)
    urgent = make_request("urgent", range(3, 19), max_tokens=12, priority=0)
    harness.scheduler.add(low)
    harness.scheduler.add(middle)
    for _ in range(3):
        harness.step()
    harness.scheduler.add(urgent)
    plan = harness.submit()
    harness.collect()
    assert plan.dropped == [0]
    assert [new.seq_id for new in plan.new_rows] == [2]
    harness.run()
    for request in (low, middle, urgent):
        assert harness.tokens[request.request_id, 0] == expected_tokens(request, 0, 48)
    assert list(harness.ends) == [("middle", 0), ("urgent", 0), ("low", 0)]
    harness.assert_drained()


def test_equal_priority_never_preempts():
    harness = full_harness(max_num_seqs=1, policy="priority")
    harness.scheduler.add(make_request("a", [1], max_tokens=5))
    harness.step()
    harness.scheduler.add(make_request("b", [2], max_tokens=5))
    harness.run()
    assert harness.scheduler.stats().num_preemptions == 0


def test_delay_holds_new_prompts_back_while_something_runs():
    delay = PromptDelay(2.0)
    assert delay.allows(10.0, 10.0, is_idle=True)
    delay.note_prompt_step(10.0)
    assert not delay.allows(10.5, 10.4, is_idle=False)  # the last prompt step took 0.5 s
    assert not delay.allows(11.3, 10.4, is_idle=False)
    assert delay.allows(11.5, 10.4, is_idle=False)
    assert PromptDelay(0.0).allows(0.0, 5.0, is_idle=False)


def test_delay_in_the_scheduler():
    now = [0.0]
    groups = [full_group()]
    cache = CacheManager(groups, layout_of(groups, 40), enable_prefix_caching=False)
    scheduler = Scheduler(scheduler_config(delay_factor=1.0), cache, clock=lambda: now[0])
    executor = FakeExecutor(groups, layout_of(groups, 40))
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=30))

    def step(seconds: float):
        plan = scheduler.schedule()
        now[0] += seconds
        scheduler.update(plan, executor.run(plan))
        return plan

    assert len(step(1.0).rows) == 1
    late = make_request("b", [4, 5, 6])
    scheduler.add(late)  # its arrival time is 0: it has waited 1.0 s, not more than one latency
    assert len(step(0.1).rows) == 1
    assert len(step(0.1).rows) == 2


def test_whole_prompts_only_without_chunked_prefill():
    harness = full_harness(
        max_num_batched_tokens=40, max_model_len=60, enable_chunked_prefill=False, max_num_seqs=4
    )
    requests = [
        make_request(name, range(i, i + length), max_tokens=8)
        for i, (name, length) in enumerate([("a", 10), ("b", 31), ("c", 40), ("d", 5)])
    ]
    harness.scheduler.add(requests[0])
    harness.step()
    for request in requests[1:]:
        harness.scheduler.add(request)
    harness.run()
    first_rows = {}
    for plan in harness.plans:
        for row in plan.rows:
            first_rows.setdefault(row.seq_id, (row, plan))
    assert [row.num_new_tokens for row, _ in first_rows.values()] == [10, 31, 40, 5]
    # The prompt of 40 fits beside nothing: it got a step of its own while others were decoding.
    assert len(first_rows[2][1].rows) == 1
    assert first_rows[2][1].step < max(p.step for p in harness.plans) - 3
    for request in requests:
        assert harness.tokens[request.request_id, 0] == expected_tokens(request, 0, 60)


def test_resumed_sequence_longer_than_the_budget_is_cut_even_then():
    harness = full_harness(
        20, max_num_batched_tokens=24, max_model_len=60, enable_chunked_prefill=False,
        caching=False, max_num_seqs=4,
    )  # fmt: skip
    requests = [make_request(str(i), range(i, i + 10), max_tokens=50) for i in range(3)]
    for request in requests:
        harness.scheduler.add(request)
    harness.run()
    assert harness.scheduler.stats().num_preemptions > 0
    for request in requests:
        assert harness.tokens[request.request_id, 0] == expected_tokens(request, 0, 60)


def test_ties_of_priority_go_by_arrival_time_not_by_order_of_addition():
    harness = full_harness(max_num_seqs=1, policy="priority")
    late = make_request("late", [1], max_tokens=2)
    early = msgspec.structs.replace(make_request("early", [2], max_tokens=2), arrival_time=-1.0)
    harness.scheduler.add(late)
    harness.scheduler.add(early)
    harness.run()
    assert first_steps(harness) == [1, 0]


def test_decodes_come_before_the_chunks_of_an_urgent_prompt():
    harness = full_harness(max_num_batched_tokens=8, policy="priority", max_num_seqs=8)
    for number in range(4):
        harness.scheduler.add(make_request(str(number), [number], max_tokens=20, priority=1))
    harness.step()
    harness.scheduler.add(make_request("urgent", range(30), max_tokens=2, priority=0))
    harness.step()
    harness.step()
    for plan in harness.plans[1:3]:
        assert [row.num_new_tokens for row in plan.rows] == [1, 1, 1, 1, 4]


def test_prompt_logprobs_are_delivered_once_although_the_prompt_is_recomputed():
    harness = full_harness(max_num_batched_tokens=8, policy="priority", max_num_seqs=1)
    harness.scheduler.add(
        make_request("low", range(1, 31), max_tokens=2, priority=1, prompt_logprobs=1)
    )
    harness.step()
    harness.step()
    harness.scheduler.add(make_request("high", [1, 2, 3], max_tokens=2, priority=0))
    harness.run()
    assert harness.scheduler.stats().num_preemptions == 1
    positions = [
        result.prompt_start + i
        for result in harness.results
        for i in range(len(result.prompt_logprobs or []))
    ]
    assert positions == list(range(1, 30))


def test_an_unfinished_prompt_keeps_the_room_it_will_need():
    harness = full_harness(12, max_num_batched_tokens=16, max_model_len=48, caching=False)
    harness.scheduler.add(make_request("a", range(40), max_tokens=4))
    harness.scheduler.add(make_request("b", range(20), max_tokens=4))
    harness.run()
    assert harness.scheduler.stats().num_preemptions == 0


def test_nobody_enters_in_the_step_in_which_somebody_lost_its_place():
    harness = full_harness(20, max_num_seqs=6, max_model_len=80)
    for number in range(6):
        harness.scheduler.add(make_request(str(number), [number] * 5, max_tokens=60))
    ended: set[int] = set()
    while harness.scheduler.has_unfinished:
        plan = harness.submit()
        if set(plan.dropped) - ended:
            assert plan.new_rows == []
        if not plan.is_empty:
            harness.collect()
        ended = {int(name) for name, _ in harness.ends}
    assert harness.scheduler.stats().num_preemptions > 0
