"""A step that a worker has started.

Made by `Worker.submit`; executors hold up to two of them for each rank and wait for them in the
order in which they were made. On a CPU a step is done by the time it is submitted.
"""

from __future__ import annotations

from typing import Protocol

from vllm.step import StepOutput, StepPlan


class PendingStep(Protocol):
    """A started step."""

    def synchronize(self) -> None:
        """Block until the device has done the step; changes nothing.

        May be called from another thread than the worker's own, also while that submits the next
        step.
        """
        ...

    def wait(self) -> StepOutput:
        """Block until the step is done and take its tokens into the worker's rows; call it once.

        Raises: what went wrong in the step, if that was not known when it was submitted.
        """
        ...


class FinishedStep:
    """A step that ran while it was submitted."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def synchronize(self) -> None:
        """See `PendingStep.synchronize`."""

    def wait(self) -> StepOutput:
        """See `PendingStep.wait`."""
        return self._output


class Runner(Protocol):
    """What runs the steps of a rank; one for each kind of device."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start one step."""
        ...
