"""The executor of one rank in the engine's own process.

Used by `LLM` and by engines without tensor parallelism. A step is done by the time `submit`
returns.
"""

from __future__ import annotations

from vllm.cache_spec import CacheLayout
from vllm.config import EngineConfig
from vllm.distributed.parallel_state import TensorParallel
from vllm.errors import EngineDeadError
from vllm.executor.abstract import RankReport
from vllm.step import StepOutput, StepPlan
from vllm.worker.worker import Worker


class InprocTicket:
    """A step that was run as it was submitted."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def wait(self) -> StepOutput:
        """Return what the step gave."""
        return self._output


class InprocExecutor:
    """One worker, called directly; loads the model when it is made."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker = Worker(config, TensorParallel.single())
        self._report = self._worker.load()
        self._cause: BaseException | None = None
        self._is_closed = False

    def reports(self) -> tuple[RankReport, ...]:
        """See `Executor.reports`."""
        return (self._report,)

    def initialize_cache(self, layout: CacheLayout) -> None:
        """See `Executor.initialize_cache`."""
        self._worker.initialize_cache(layout)

    def submit(self, plan: StepPlan) -> InprocTicket:
        """Run one step.

        Raises:
            EngineDeadError: the step failed, now or before; the cause is chained.
        """
        self.check_health()
        try:
            return InprocTicket(self._worker.execute(plan))
        except Exception as exc:
            self._cause = exc
            raise EngineDeadError(f"step {plan.step} failed: {type(exc).__name__}: {exc}") from exc

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
            self._worker.close()
