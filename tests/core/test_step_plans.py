"""Golden traces: the plans of small scenarios, word for word."""

from __future__ import annotations

from tests.core.builders import full_harness, make_request
from vllm.step import StepPlan


def describe(plan: StepPlan) -> str:
    """One line for a plan: drops, entries (tokens computed, table), copies, rows."""
    parts = []
    if plan.dropped:
        parts.append(f"drop {plan.dropped}")
    for new in plan.new_rows:
        parts.append(
            f"new {new.seq_id}.{new.branch} at {new.num_computed_tokens} {new.block_ids[0]}"
        )
    for copy in plan.copies:
        parts.append(f"copy {copy.source}>{copy.target}")
    for row in plan.rows:
        blocks = f" {row.new_block_ids[0]}" if row.new_block_ids[0] else ""
        samples = "" if row.num_samples == 1 else f" x{row.num_samples}"
        parts.append(
            f"{row.seq_id}: {row.num_computed_tokens}+{row.num_new_tokens}{blocks}{samples}"
        )
    return "; ".join(parts)


def trace(harness) -> list[str]:
    return [describe(plan) for plan in harness.plans]


def test_chunks_decodes_and_a_prefix_hit():
    harness = full_harness(16, max_num_batched_tokens=8, max_model_len=32)
    harness.scheduler.add(make_request("a", range(1, 14), max_tokens=4))
    harness.step()
    harness.scheduler.add(make_request("b", [*range(1, 10), 40], max_tokens=3))
    harness.run()
    assert trace(harness) == [
        "new 0.0 at 0 [0, 1]; 0: 0+8 x0",
        "new 1.0 at 8 [0, 1, 4]; 0: 8+5 [2, 3]; 1: 8+2",
        "0: 13+1; 1: 10+1",
        "0: 14+1; 1: 11+1",
        "drop [1]; 0: 15+1",
    ]


def test_branches():
    harness = full_harness(16, max_model_len=32)
    harness.scheduler.add(make_request("a", range(1, 7), max_tokens=4, n=2))
    harness.run()
    assert trace(harness) == [
        "new 0.0 at 0 [0, 1]; 0: 0+6 x2",
        "new 1.1 at 6 [0, 2]; copy 1>2; 0: 6+1; 1: 6+1",
        "0: 7+1; 1: 7+1",
        "0: 8+1 [3]; 1: 8+1 [4]",
    ]


def test_preemption_and_recompute():
    harness = full_harness(6, max_model_len=16, caching=False)
    harness.scheduler.add(make_request("a", range(1, 8), max_tokens=7))
    harness.scheduler.add(make_request("b", range(11, 18), max_tokens=7))
    harness.run()
    assert trace(harness) == [
        "new 0.0 at 0 [0, 1]; new 1.0 at 0 [2, 3]; 0: 0+7; 1: 0+7",
        "0: 7+1; 1: 7+1",
        "0: 8+1 [4]; 1: 8+1 [5]",
        "0: 9+1; 1: 9+1",
        "0: 10+1; 1: 10+1",
        "0: 11+1; 1: 11+1",
        "drop [1]; 0: 12+1 [2]",
        "drop [0]; new 1.0 at 0 [0, 1, 4, 2]; 1: 0+13",
    ]


def test_a_plan_that_only_zeroes_is_submitted():
    """The arena says once only that a superblock has changed hands."""
    assert StepPlan(step=0).is_empty
    assert not StepPlan(step=0, zero_superblocks=[3]).is_empty
