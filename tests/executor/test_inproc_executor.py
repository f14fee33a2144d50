"""The executor of one rank: two steps under way, faults that show late, nothing freed too early."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.utils.one_thread import one_thread  # noqa: F401  a fixture for the whole module
from tests.utils.tiny_engine import make_config, make_first_plan, make_layout
from vllm.errors import EngineDeadError
from vllm.executor.inproc_executor import InprocExecutor
from vllm.step import RowSampling, StepOutput, StepPlan


class LateStep:
    """A step of a device: it fails, or is done, when it is waited for."""

    def __init__(self, step: int, error: Exception | None = None) -> None:
        self.is_waited = False
        self._step = step
        self._error = error

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait(self) -> StepOutput:
        self.is_waited = True
        if self._error is not None:
            raise self._error
        return StepOutput(step=self._step, rows=[])


@pytest.fixture
def executor() -> Iterator[InprocExecutor]:
    made = InprocExecutor(make_config(1))
    made.initialize_cache(make_layout(made))
    yield made
    made.shutdown()


def script(executor: InprocExecutor, steps: list[LateStep]) -> None:
    """Let the worker give these steps out."""
    rest = iter(steps)
    executor._worker.submit = lambda plan: next(rest)  # type: ignore[method-assign]


def test_a_step_is_run_and_waited_for(executor: InprocExecutor) -> None:
    plan = make_first_plan([[3, 4, 5]], [RowSampling(temperature=0.0)])
    first, second = executor.submit(plan), executor.submit(StepPlan(step=1, dropped=[0]))
    assert len(first.wait().rows[0].token_ids) == 1
    assert second.wait().rows == []


def test_a_fault_that_shows_late_is_the_cause_of_all_that_follow(executor: InprocExecutor) -> None:
    script(executor, [LateStep(0), LateStep(1, ValueError("burnt")), LateStep(2)])
    first, second = executor.submit(StepPlan(step=0)), executor.submit(StepPlan(step=1))
    assert first.wait().step == 0
    third = executor.submit(StepPlan(step=2))
    with pytest.raises(EngineDeadError, match="step 1 failed: ValueError: burnt") as caught:
        second.wait()
    assert isinstance(caught.value.__cause__, ValueError)
    for use in (third.wait, executor.check_health, lambda: executor.submit(StepPlan(step=3))):
        with pytest.raises(EngineDeadError, match="earlier step failed: ValueError: burnt"):
            use()


def test_steps_are_waited_for_in_order(executor: InprocExecutor) -> None:
    script(executor, [LateStep(0), LateStep(1)])
    executor.submit(StepPlan(step=0))
    with pytest.raises(AssertionError, match="step 0 must be waited for before step 1"):
        executor.submit(StepPlan(step=1)).wait()


def test_the_end_waits_for_the_device(executor: InprocExecutor) -> None:
    steps = [LateStep(0, ValueError("burnt")), LateStep(1)]
    script(executor, steps)
    ticket = executor.submit(StepPlan(step=0))
    executor.submit(StepPlan(step=1))
    executor.shutdown()
    assert all(step.is_waited for step in steps)
    with pytest.raises(EngineDeadError, match="shut down"):
        ticket.wait()
