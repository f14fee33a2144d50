"""Runs an EngineCore until it is told to stop: take messages, step, report.

The same loop serves a thread of the caller's process (`engine/core_client.py`) and a process of
its own (`engine/core_proc.py`). It touches neither sockets nor text.
"""

from __future__ import annotations

import queue
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from vllm.engine.core import EngineCore
from vllm.engine.messages import ControlMessage, EngineFailed, ReportMessage, Shutdown
from vllm.logger import init_logger

logger = init_logger(__name__)

_PAUSE_S = 0.002  # between looks at work that cannot go on yet
_HEALTH_S = 1.0  # between looks at idle ranks


class Inbox(Protocol):
    """Where messages for the engine side arrive."""

    def take(self, timeout_s: float) -> list[ControlMessage]:
        """Return what has arrived, in order; wait up to `timeout_s` for the first."""
        ...


class QueueInbox:
    """An inbox inside a process; any thread may put messages into it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[ControlMessage] = queue.SimpleQueue()

    def put(self, message: ControlMessage) -> None:
        """Add a message."""
        self._queue.put(message)

    def take(self, timeout_s: float) -> list[ControlMessage]:
        """See `Inbox.take`."""
        messages: list[ControlMessage] = []
        try:
            messages.append(self._queue.get(timeout_s > 0, timeout_s or None))
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages


class CoreLoop:
    """The life of an engine side.

    Attributes:
        step_started_s: when the step that runs now began (monotonic seconds), 0 between steps.
    """

    def __init__(
        self, core: EngineCore, inbox: Inbox, send: Callable[[ReportMessage], None]
    ) -> None:
        """Connect a core.

        Args:
            core: what takes the steps.
            inbox: messages from the caller's side.
            send: takes each report to the caller's side.
        """
        self._core = core
        self._inbox = inbox
        self._send = send
        self.step_started_s = 0.0

    def run(self) -> None:
        """Serve until a Shutdown message, or until a step fails.

        A failing step is reported as EngineFailed; every open request ends with it.
        """
        try:
            while self._turn():
                pass
        except Exception as error:
            logger.exception("the engine ends because of an error")
            self._send(describe_failure(error))
        finally:
            self._core.shutdown()

    def _turn(self) -> bool:
        """Take messages and a step; False once the engine is to stop."""
        core = self._core
        has_work = core.has_work
        messages = self._inbox.take(0.0 if has_work else _HEALTH_S)
        for message in messages:
            if isinstance(message, Shutdown):
                return False
            core.handle(message)
        if not (messages or has_work):
            core.check_health()
            return True
        self.step_started_s = time.monotonic()
        num_steps = core.num_steps
        outputs = core.make_outputs(core.step())
        self.step_started_s = 0.0
        if messages or outputs.results or outputs.failures or core.num_steps > num_steps:
            self._send(outputs)
        elif core.has_work and not core.num_steps_in_flight:
            time.sleep(_PAUSE_S)  # a form is compiled, or prompts are held back for a while
        return True


def describe_failure(error: BaseException) -> EngineFailed:
    """Return the report of an error that ends the engine side."""
    return EngineFailed(
        kind=type(error).__name__,
        message=str(error) or type(error).__name__,
        trace="".join(traceback.format_exception(error)),
    )
