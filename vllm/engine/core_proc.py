"""The engine's own process: its main function, its sockets, its ties to the process that made it.

Started by `engine/client.py` as a fresh interpreter. It reads its config from stdin, loads the
model, says that it is ready, and serves. When stdin closes, the process that made it is gone: it
ends at once.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import sys
import threading
import time

import msgspec
import zmq

from vllm.engine.core import make_core
from vllm.engine.core_loop import CoreLoop, describe_failure
from vllm.engine.messages import ControlMessage, EngineFailed, Heartbeat, ReportMessage
from vllm.engine.process_start import ProcessStart
from vllm.logger import init_logger
from vllm.plugins import load_general_plugins
from vllm.utils.heap import freeze_heap

logger = init_logger(__name__)

HEARTBEAT_S = 1.0
_LINGER_MS = 2000  # so that a last report is not lost


class SocketInbox:
    """Messages that arrive over a socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._decode = msgspec.msgpack.Decoder(ControlMessage).decode

    def take(self, timeout_s: float) -> list[ControlMessage]:
        """See `Inbox.take`."""
        messages: list[ControlMessage] = []
        if timeout_s > 0 and not self._socket.poll(int(timeout_s * 1000)):
            return messages
        try:
            while True:
                messages.append(self._decode(self._socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return messages


class ReportSocket:
    """Sends reports; each thread needs one of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(address)
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, report: ReportMessage) -> None:
        """Send one report; never blocks."""
        self._socket.send(self._encode(report))

    def close(self) -> None:
        """Send what is left and close."""
        self._socket.close()


def run_engine_process() -> None:
    """Be an engine process; returns when it was told to stop, exits with 1 after an error."""
    # Ctrl-C, and a SIGTERM to the whole group, are for the process that made this one: it lets
    # running requests finish, then says when to stop. Ranks inherit this.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    start: ProcessStart = pickle.load(sys.stdin.buffer)
    logging.getLogger("vllm").setLevel(start.log_level)
    lifeline = threading.Thread(target=_die_with_parent, args=(start.directory,), daemon=True)
    lifeline.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reports = ReportSocket(context, start.output_address)
    pulse = _Pulse(context, start.output_address)
    pulse.start()
    has_failed = False

    def send(report: ReportMessage) -> None:
        nonlocal has_failed
        has_failed = has_failed or isinstance(report, EngineFailed)
        reports.send(report)

    try:
        load_general_plugins()
        core = make_core(start.config)
    except Exception as error:
        send(describe_failure(error))
    else:
        inputs = context.socket(zmq.PULL)
        inputs.setsockopt(zmq.RCVHWM, 0)
        inputs.connect(start.input_address)
        loop = CoreLoop(core, SocketInbox(inputs), send)
        pulse.loop = loop
        send(core.ready)
        freeze_heap()
        loop.run()
    reports.close()
    pulse.stop()
    context.destroy(linger=_LINGER_MS)
    if has_failed:
        sys.stderr.flush()
        os._exit(1)  # threads of a broken library must not hold the process back


class _Pulse(threading.Thread):
    """Says every second that the process lives, and how long the current step has been running."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        super().__init__(name="pulse", daemon=True)
        self._context = context
        self._address = address
        self._end = threading.Event()
        self.loop: CoreLoop | None = None

    def run(self) -> None:
        """Send until stopped."""
        reports = ReportSocket(self._context, self._address)
        while not self._end.wait(HEARTBEAT_S):
            started_s = 0.0 if self.loop is None else self.loop.step_started_s
            reports.send(Heartbeat(step_age_s=time.monotonic() - started_s if started_s else 0.0))
        reports.close()

    def stop(self) -> None:
        """Stop and wait for the thread to close its socket."""
        self._end.set()
        self.join(2 * HEARTBEAT_S)


def _die_with_parent(directory: str) -> None:
    """End this process, and what its parent can no longer remove, when stdin closes."""
    # Not through sys.stdin: the interpreter would wait for its lock when it ends, and abort.
    while os.read(0, 4096):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)
