"""The executor of one rank in the engine's own process.

Used by `LLM` and by engines without tensor parallelism. Whether a step is done by the time `submit`
returns is the worker's affair.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import NoReturn

from vllm.cache_spec import CacheLayout
from vllm.config import EngineConfig
from vllm.distributed.parallel_state import TensorParallel
from vllm.errors import EngineDeadError
from vllm.executor.abstract import RankReport
from vllm.step import StepOutput, StepPlan
from vllm.worker.pending_step import PendingStep
from vllm.worker.worker import Worker


class InprocTicket:
    """A step that the worker has started."""

    def __init__(self, executor: InprocExecutor, step: int) -> None:
        self._executor = executor
        self._step = step

    def wait(self) -> StepOutput:
        """See `Ticket.wait`."""
        return self._executor.take_output(self._step)


class InprocExecutor:
    """One worker, called directly; loads the model when it is made."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker = Worker(config, TensorParallel.single())
        self._report = self._worker.load()
        self._started: deque[tuple[int, PendingStep]] = deque()
        self._cause: BaseException | None = None
        self._is_closed = False

    def reports(self) -> tuple[RankReport, ...]:
        """See `Executor.reports`."""
        return (self._report,)

    def initialize_cache(self, layout: CacheLayout) -> None:
        """See `Executor.initialize_cache`."""
        self._worker.initialize_cache(layout)

    def submit(self, plan: StepPlan) -> InprocTicket:
        """Start one step.

        Raises:
            EngineDeadError: it failed as it started, or one before it did; the cause is chained.
        """
        self.check_health()
        try:
            self._started.append((plan.step, self._worker.submit(plan)))
        except Exception as exc:
            self._fail(plan.step, exc)
        return InprocTicket(self, plan.step)

    def take_output(self, step: int) -> StepOutput:
        """Block until `step`, the oldest one started, is done.

        Raises:
            EngineDeadError: it failed, or one before it did; the cause is chained.
        """
        self.check_health()
        number, pending = self._started.popleft()
        assert number == step, f"step {number} must be waited for before step {step}"
        try:
            return pending.wait()
        except Exception as exc:
            self._fail(step, exc)

    def check_health(self) -> None:
        """See `Executor.check_health`."""
        if self._is_closed:
            raise EngineDeadError("the executor has been shut down")
        if self._cause is not None:
            raise EngineDeadError(
                f"an earlier step failed: {type(self._cause).__name__}: {self._cause}"
            ) from self._cause

    def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        if not self._is_closed:
            self._is_closed = True
            while self._started:  # the device still works on what the worker is about to free
                with contextlib.suppress(Exception):
                    self._started.popleft()[1].wait()
            self._worker.close()

    def _fail(self, step: int, cause: Exception) -> NoReturn:
        self._cause = cause
        raise EngineDeadError(f"step {step} failed: {type(cause).__name__}: {cause}") from cause
