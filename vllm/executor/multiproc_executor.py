"""The executor of several ranks on one host: a process each, plans broadcast once a step.

Used where tensor_parallel_size is above 1. Rank 0 answers; any rank that ends or fails ends the
engine with an error that names it. Sockets are the only tie to the ranks: when they close, the
ranks end.
"""

from __future__ import annotations

import contextlib
import pickle
import tempfile
import threading
import time
from pathlib import Path
from typing import NoReturn

from vllm.cache_spec import CacheLayout
from vllm.config import EngineConfig
from vllm.errors import EngineDeadError
from vllm.executor import wire
from vllm.executor.abstract import RankReport
from vllm.executor.rank_process import RankProcess, start_rank, wait_for_ranks
from vllm.logger import init_logger
from vllm.step import StepOutput, StepPlan

logger = init_logger(__name__)

_SHUTDOWN_S = 5.0
_SETTLE_S = 1.0  # how long after a fault others are collected, to name the first cause


class MultiprocTicket:
    """A step that the ranks were told to run."""

    def __init__(self, executor: MultiprocExecutor, step: int) -> None:
        self._executor = executor
        self._step = step

    def wait(self) -> StepOutput:
        """See `Ticket.wait`."""
        return self._executor.take_output(self._step)


class MultiprocExecutor:
    """One process a rank; loads the model on all of them when it is made.

    Raises:
        VllmError: what a rank raised while loading.
        EngineDeadError: a rank ended while loading.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._lock = threading.RLock()
        self._outputs: dict[int, StepOutput] = {}
        self._cause: EngineDeadError | None = None
        self._is_closed = False
        # A process that a rank has started may still write while it is removed.
        self._directory = tempfile.TemporaryDirectory(
            prefix="vllm-ranks-", ignore_cleanup_errors=True
        )
        init_method = Path(self._directory.name, "rendezvous").as_uri()
        self._is_loaded = False
        self._ranks = [start_rank(i) for i in range(config.parallel_config.tensor_parallel_size)]
        try:
            for rank in self._ranks:
                self._send(rank, wire.pack(wire.CONFIG, (config, rank.number, init_method)))
            self._reports = tuple(pickle.loads(body) for body in self._collect())
            self._is_loaded = True
        except BaseException:
            self.shutdown()
            raise

    def reports(self) -> tuple[RankReport, ...]:
        """See `Executor.reports`."""
        return self._reports

    def rank_pids(self) -> tuple[int, ...]:
        """Return the process ids of the ranks, in rank order."""
        return tuple(rank.pid for rank in self._ranks)

    def initialize_cache(self, layout: CacheLayout) -> None:
        """See `Executor.initialize_cache`."""
        self.check_health()
        self._broadcast(wire.pack(wire.LAYOUT, layout))
        self._collect()

    def submit(self, plan: StepPlan) -> MultiprocTicket:
        """See `Executor.submit`."""
        self._raise_cause()
        self._broadcast(wire.encode_plan(plan))
        return MultiprocTicket(self, plan.step)

    def take_output(self, step: int) -> StepOutput:
        """Block until rank 0 has answered `step`; raises EngineDeadError if a rank ended."""
        with self._lock:
            while step not in self._outputs:
                self._raise_cause()
                self._receive(timeout_s=None)
            return self._outputs.pop(step)

    def check_health(self) -> None:
        """See `Executor.check_health`."""
        if self._lock.acquire(blocking=False):  # else another thread is watching the ranks already
            try:
                self._raise_cause()
                self._receive(timeout_s=0)
            finally:
                self._lock.release()

    def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        if self._is_closed:
            return
        self._is_closed = True
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.connection.send_bytes(wire.QUIT)
        deadline_s = time.monotonic() + (_SHUTDOWN_S if self._cause is None else 0.0)
        for rank in self._ranks:
            rank.stop(patience_s=max(0.0, deadline_s - time.monotonic()))
        self._directory.cleanup()

    def _raise_cause(self) -> None:
        if self._cause is not None:
            raise self._cause
        if self._is_closed:
            raise EngineDeadError("the executor has been shut down")

    def _broadcast(self, frame: bytes) -> None:
        for rank in self._ranks:
            self._send(rank, frame)

    def _send(self, rank: RankProcess, frame: bytes) -> None:
        try:
            rank.connection.send_bytes(frame)
        except OSError:  # it has ended
            with self._lock:
                self._fail()

    def _collect(self) -> list[bytes]:
        """Wait for one frame, no output, of every rank; returns the bodies in rank order."""
        bodies: dict[int, bytes] = {}
        with self._lock:
            while len(bodies) < len(self._ranks):
                self._raise_cause()
                bodies.update(self._receive(timeout_s=None))
        return [bodies[rank.number] for rank in self._ranks]

    def _receive(self, timeout_s: float | None) -> dict[int, bytes]:
        """Read what the ranks have sent: keeps outputs, returns the bodies of other frames.

        Raises:
            EngineDeadError: a rank ended or failed.
        """
        bodies: dict[int, bytes] = {}
        for rank in wait_for_ranks(self._ranks, timeout_s):
            frame = rank.read()
            if frame is None:
                self._fail()
            kind, body = wire.split(frame)
            if kind == wire.OUTPUT:
                output = wire.decode_output(body)
                self._outputs[output.step] = output
            else:
                bodies[rank.number] = body
        return bodies

    def _fail(self) -> NoReturn:
        """Find the first cause, end every rank, and raise.

        Ranks fall like dominoes: the peers of one that ended fail in their next collective, maybe
        sooner than the end itself is seen. So all that happens in a short while is gathered before
        one is named.
        """
        deadline_s = time.monotonic() + _SETTLE_S
        while living := [rank for rank in self._ranks if not rank.has_ended]:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            for rank in wait_for_ranks(living, left_s):
                rank.read()
        ended = [rank for rank in self._ranks if rank.has_ended]
        for rank in self._ranks:
            rank.stop()
        first = min(ended, key=lambda rank: (rank.fault is not None, rank.ended_s))
        if not self._is_loaded and first.fault is not None and first.fault.error is not None:
            raise first.fault.error
        self._cause = EngineDeadError(first.describe_end())
        logger.error("%s", self._cause)
        raise self._cause
