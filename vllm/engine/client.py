"""The caller's end of an engine process: start it, speak to it, notice its end.

Used by `AsyncLLMEngine` in the API process. The engine process is a fresh interpreter, so that it
does not run the caller's main module again; a pipe to its stdin tells it when this process has
gone. Imports no torch.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import msgspec
import zmq

from vllm import envs
from vllm.config import EngineConfig
from vllm.engine.core_client import ReportHandler, make_start_error
from vllm.engine.messages import (
    ControlMessage,
    EngineFailed,
    EngineReady,
    Heartbeat,
    ReportMessage,
    Shutdown,
)
from vllm.engine.process_start import ProcessStart
from vllm.errors import EngineDeadError
from vllm.logger import init_logger

logger = init_logger(__name__)

_POLL_MS = 100
_STOP_S = 10.0
_LAST_REPORT_S = 1.0  # a process that has ended may have said why
_CODE = (
    "import sys; sys.path[:] = {path!r}\n"
    "from vllm.engine.core_proc import run_engine_process\n"
    "run_engine_process()"
)


class ProcessCore:
    """An engine side in a process of its own."""

    takes_callables = False

    def __init__(self, config: EngineConfig) -> None:
        """Take the config; nothing is started yet."""
        self._start = ProcessStart(
            config=config,
            directory=tempfile.mkdtemp(prefix="vllm-", dir=envs.VLLM_RPC_BASE_PATH),
            log_level=logging.getLogger("vllm").level,
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inputs = self._bind(zmq.PUSH, self._start.input_address)
        self._outputs = self._bind(zmq.PULL, self._start.output_address)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ReportMessage).decode
        self._process: subprocess.Popen[bytes] | None = None
        self._target: tuple[asyncio.AbstractEventLoop, ReportHandler] | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._last_sign_s = 0.0
        self._is_closed = False
        self._lock = threading.Lock()

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM if kind == zmq.PUSH else zmq.RCVHWM, 0)
        socket.bind(address)
        return socket

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None before it is started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """See `CoreClient.start`."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE.format(path=sys.path)],
            stdin=subprocess.PIPE,
            env=envs.make_child_environment(),
        )
        assert self._process.stdin is not None
        atexit.register(self.shutdown)
        with contextlib.suppress(BrokenPipeError):  # it has ended already: wait_ready says so
            pickle.dump(self._start, self._process.stdin)
            self._process.stdin.flush()

    def wait_ready(self) -> EngineReady:
        """See `CoreClient.wait_ready`."""
        while True:
            has_ended = self._need_process().poll() is not None
            if self._outputs.poll(_POLL_MS):
                report = self._decode(self._outputs.recv())
                if isinstance(report, EngineReady):
                    return report
                if isinstance(report, EngineFailed):
                    self.shutdown()
                    logger.error("the engine process failed to start\n%s", report.trace)
                    raise make_start_error(report.kind, report.message)
            elif has_ended:
                cause = self._describe_end()
                self.shutdown()
                raise EngineDeadError(f"the engine failed to start: {cause}")

    def attach(self, loop: asyncio.AbstractEventLoop, handle: ReportHandler) -> None:
        """See `CoreClient.attach`."""
        self._target = (loop, handle)
        self._last_sign_s = time.monotonic()
        loop.add_reader(self._outputs.fileno(), self._read_all)
        loop.call_soon(self._read_all)  # the socket's file tells of changes only
        threading.Thread(target=self._watch_process, name="engine-watch", daemon=True).start()
        self._watchdog = loop.call_later(1.0, self._check_signs)

    def detach(self) -> None:
        """See `CoreClient.detach`."""
        if self._target is None:
            return
        loop, _ = self._target
        self._target = None
        if self._watchdog is not None:
            self._watchdog.cancel()
        if not loop.is_closed() and not self._outputs.closed:
            loop.remove_reader(self._outputs.fileno())

    def send(self, message: ControlMessage) -> None:
        """See `CoreClient.send`."""
        if not self._is_closed:
            self._inputs.send(self._encode(message))

    def shutdown(self) -> None:
        """See `CoreClient.shutdown`."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(zmq.ZMQError):
                self._inputs.send(self._encode(Shutdown()), zmq.NOBLOCK)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        if process is not None:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        self.detach()
        self._context.destroy(linger=0)
        shutil.rmtree(self._start.directory, ignore_errors=True)
        atexit.unregister(self.shutdown)

    def _read_all(self) -> None:
        """Hand over every report that has arrived."""
        while self._target is not None and not self._outputs.closed:
            try:
                data = self._outputs.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._last_sign_s = time.monotonic()
            report = self._decode(data)
            if isinstance(report, Heartbeat):
                self._check_step(report)
            else:
                self._hand_over(report)

    def _hand_over(self, report: ReportMessage) -> None:
        if self._target is not None:
            self._target[1](report)

    def _check_step(self, beat: Heartbeat) -> None:
        limit_s = envs.VLLM_ENGINE_ITERATION_TIMEOUT_S
        if beat.step_age_s > limit_s:
            self._hand_over(
                EngineFailed(
                    kind="EngineDeadError",
                    message=f"a step has been running for {beat.step_age_s:.0f} s, more than "
                    f"VLLM_ENGINE_ITERATION_TIMEOUT_S = {limit_s:.0f}",
                )
            )

    def _check_signs(self) -> None:
        """Once a second: an engine process that says nothing at all is stuck, or stopped."""
        if self._target is None:
            return
        self._read_all()
        limit_s = envs.VLLM_RPC_TIMEOUT / 1000
        silent_s = time.monotonic() - self._last_sign_s
        if silent_s > limit_s:
            message = f"the engine process has not been heard of for {silent_s:.0f} s"
            self._hand_over(EngineFailed(kind="EngineDeadError", message=message))
        if self._target is not None:
            self._watchdog = self._target[0].call_later(1.0, self._check_signs)

    def _watch_process(self) -> None:
        """Wait for the end of the process, in a thread, and say it on the loop."""
        self._need_process().wait()
        target = self._target
        if target is None or self._is_closed:
            return
        with contextlib.suppress(RuntimeError):  # the loop closed in this very moment
            target[0].call_soon_threadsafe(self._report_end)

    def _report_end(self) -> None:
        """Hand over what the process said last, then that it has ended."""
        deadline_s = time.monotonic() + _LAST_REPORT_S
        while not self._outputs.closed and self._outputs.poll(0) and time.monotonic() < deadline_s:
            self._read_all()
        self._hand_over(EngineFailed(kind="EngineDeadError", message=self._describe_end()))

    def _describe_end(self) -> str:
        code = self._need_process().poll()
        if code is not None and code < 0:
            return f"the engine process was killed by {signal.Signals(-code).name}"
        return f"the engine process ended with exit code {code}"

    def _need_process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "start comes first"
        return self._process
