"""The engine's handle of one rank's process: start, read, stop, and say how it ended.

Used by the multi-process executor. The process is a fresh interpreter with one end of a socket
pair: it does not run the user's main module again, and a closed socket tells either side that the
other is gone.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

from vllm import envs
from vllm.executor import wire

_EXIT_S = 2.0  # between the close of a socket and the end of its process
_CODE = (
    "import sys; sys.path[:] = {path!r}\n"
    "from vllm.executor.worker_process import run_rank\n"
    "run_rank({socket_fd})"
)


class RankProcess:
    """One rank.

    Attributes:
        number: its rank.
        connection: the engine's end of the socket.
        fault: what it said before it ended, or None.
        ended_s: when it failed or its end was noticed (monotonic seconds), 0 while it lives.
    """

    def __init__(
        self, number: int, process: subprocess.Popen[bytes], connection: Connection
    ) -> None:
        self.number = number
        self.connection = connection
        self.fault: wire.RankFault | None = None
        self.ended_s = 0.0
        self._process = process

    @property
    def pid(self) -> int:
        """Process id, as operators see it."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether its end has been noticed."""
        return self.ended_s > 0.0

    def read(self) -> bytes | None:
        """Return the next frame, or None if the rank has ended; its fault is kept."""
        try:
            frame = self.connection.recv_bytes()
        except (EOFError, OSError):
            self.ended_s = self.ended_s or time.monotonic()
            return None
        kind, body = wire.split(frame)
        if kind == wire.ERROR:
            self.fault = fault = pickle.loads(body)
            self.ended_s = fault.time_s
            return None
        return frame

    def stop(self, patience_s: float = 0.0) -> None:
        """End the process, by force after `patience_s`; safe to call twice."""
        if self.has_ended:
            patience_s = max(patience_s, _EXIT_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self.connection.close()

    def describe_end(self) -> str:
        """Say how the process ended; call after `stop`."""
        if self.fault is not None:
            return f"rank {self.number} failed: {self.fault.summary}\n{self.fault.traceback}"
        code = self._process.returncode
        if code < 0:
            with contextlib.suppress(ValueError):
                name = signal.Signals(-code).name
                return f"rank {self.number} was killed by {name} (exit code {code})"
        return f"rank {self.number} ended with exit code {code}"


def start_rank(number: int) -> RankProcess:
    """Start the process of a rank; it waits for its config."""
    ours, theirs = socket.socketpair()
    with theirs:
        code = _CODE.format(path=sys.path, socket_fd=theirs.fileno())
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=envs.make_child_environment(GLOO_SOCKET_IFNAME="lo"),
        )
    return RankProcess(number, process, Connection(ours.detach()))


def wait_for_ranks(ranks: Sequence[RankProcess], timeout_s: float | None) -> list[RankProcess]:
    """Return the ranks that have something to read, their end included; empty after the timeout."""
    connections = {id(rank.connection): rank for rank in ranks}
    return [connections[id(ready)] for ready in wait([r.connection for r in ranks], timeout_s)]
