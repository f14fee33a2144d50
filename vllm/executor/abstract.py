"""The seam between the engine and the workers.

An executor owns the ranks: it loads the model on each, learns what they need and have, lays out the
cache, and runs plans. The engine never sees a tensor; the workers never see a request.
"""

from __future__ import annotations

from typing import Protocol

from vllm.cache_spec import CacheLayout
from vllm.step import StepOutput, StepPlan
from vllm.worker.report import LayerKernel, RankReport

__all__ = ["Executor", "LayerKernel", "RankReport", "Ticket"]


class Ticket(Protocol):
    """A submitted step."""

    def wait(self) -> StepOutput:
        """Block until the step is done; raises EngineDeadError with the cause if a rank died."""
        ...


class Executor(Protocol):
    """Runs plans on one or several ranks."""

    def reports(self) -> tuple[RankReport, ...]:
        """Return what every rank said after loading, in rank order."""
        ...

    def initialize_cache(self, layout: CacheLayout) -> None:
        """Allocate the arena of `layout` on every rank and bind it to the layers."""
        ...

    def submit(self, plan: StepPlan) -> Ticket:
        """Start one step on every rank; tickets are waited for in the order of their steps."""
        ...

    def check_health(self) -> None:
        """Raise EngineDeadError, naming the rank and the cause, if one has ended."""
        ...

    def shutdown(self) -> None:
        """Free everything; safe to call twice."""
        ...
