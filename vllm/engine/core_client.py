"""How an asynchronous engine reaches its engine side, wherever that runs.

`ThreadCore` keeps it in a thread of this process; `engine/client.py` in a process of its own. Both
are started, awaited and spoken to in the same way.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable
from typing import Protocol

from vllm.config import EngineConfig
from vllm.engine.core import EngineCore, make_core
from vllm.engine.core_loop import CoreLoop, QueueInbox
from vllm.engine.messages import ControlMessage, EngineReady, ReportMessage, Shutdown
from vllm.errors import EngineDeadError, VllmError

_STOP_S = 10.0

ReportHandler = Callable[[ReportMessage], None]


class CoreClient(Protocol):
    """The caller's end of an engine side."""

    @property
    def takes_callables(self) -> bool:
        """Whether requests may carry Python functions."""
        ...

    def start(self) -> None:
        """Begin to load the model; returns at once."""
        ...

    def wait_ready(self) -> EngineReady:
        """Wait until the model is loaded.

        Raises: the error that ended the engine side while it started.
        """
        ...

    def attach(self, loop: asyncio.AbstractEventLoop, handle: ReportHandler) -> None:
        """Give every later report to `handle`, on `loop`; call on that loop."""
        ...

    def detach(self) -> None:
        """Give no more reports to the loop; call on that loop."""
        ...

    def send(self, message: ControlMessage) -> None:
        """Send a message; never blocks."""
        ...

    def shutdown(self) -> None:
        """End the engine side; safe to call twice and from any thread."""
        ...


class ThreadCore:
    """An engine side in a thread of this process."""

    takes_callables = True

    def __init__(self, config: EngineConfig) -> None:
        """Take the config; nothing is loaded yet."""
        self._config = config
        self._inbox = QueueInbox()
        self._ready = threading.Event()
        self._core: EngineCore | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._lock = threading.Lock()
        self._backlog: list[ReportMessage] = []
        self._target: tuple[asyncio.AbstractEventLoop, ReportHandler] | None = None

    def start(self) -> None:
        """See `CoreClient.start`."""
        atexit.register(self.shutdown)  # a thread in the middle of a step would abort the process
        self._thread.start()

    def wait_ready(self) -> EngineReady:
        """See `CoreClient.wait_ready`."""
        self._ready.wait()
        if self._error is not None:
            raise self._error
        assert self._core is not None, "a core is there once it is ready"
        return self._core.ready

    def attach(self, loop: asyncio.AbstractEventLoop, handle: ReportHandler) -> None:
        """See `CoreClient.attach`."""
        with self._lock:
            self._target = (loop, handle)
            backlog, self._backlog = self._backlog, []
        for report in backlog:
            handle(report)

    def detach(self) -> None:
        """See `CoreClient.detach`."""
        with self._lock:
            self._target = None

    def send(self, message: ControlMessage) -> None:
        """See `CoreClient.send`."""
        self._inbox.put(message)

    def shutdown(self) -> None:
        """See `CoreClient.shutdown`."""
        self._inbox.put(Shutdown())
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)
            atexit.unregister(self.shutdown)

    def _run(self) -> None:
        try:
            self._core = make_core(self._config)
        except Exception as error:
            self._error = error
            return
        finally:
            self._ready.set()
        CoreLoop(self._core, self._inbox, self._report).run()

    def _report(self, report: ReportMessage) -> None:
        with self._lock:
            target = self._target
            if target is None:
                self._backlog.append(report)
                return
        loop, handle = target
        if not loop.is_closed():
            loop.call_soon_threadsafe(handle, report)


def make_start_error(kind: str, message: str) -> VllmError:
    """Return the error of a start that failed in another process, of its own type if it is ours."""
    own = {cls.__name__: cls for cls in _all_errors(VllmError)}
    return own.get(kind, EngineDeadError)(message)


def _all_errors(base: type[VllmError]) -> list[type[VllmError]]:
    found = [base]
    for child in base.__subclasses__():
        found += _all_errors(child)
    return found
