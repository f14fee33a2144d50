"""The process of one rank: makes a worker, then answers frames until told to stop.

Started by the multi-process executor with one end of a socket as its only tie. It ends when that
socket closes, so that no rank outlives its engine, however the engine ended. A plan is started as
it comes, also while the step before it runs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import shutil
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from urllib.parse import unquote, urlsplit

from vllm.config import EngineConfig
from vllm.distributed.parallel_state import TensorParallel
from vllm.errors import VllmError
from vllm.executor import wire
from vllm.utils.heap import freeze_heap
from vllm.worker.pending_step import PendingStep
from vllm.worker.worker import Worker

_STEP_DONE = b"S"  # from within the process: the oldest step has been done


def run_rank(socket_fd: int) -> None:
    """Serve one rank over the socket; returns when told to quit, exits with 1 after an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's to handle
    connection = Connection(socket_fd)
    try:
        kind, body = wire.split(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(1)
    assert kind == wire.CONFIG, f"the first frame must be the config, got {kind!r}"
    config, rank, init_method = pickle.loads(body)
    frames: SimpleQueue[bytes] = SimpleQueue()
    reader_args = connection, frames, _find_folder(init_method)
    threading.Thread(target=_read_frames, args=reader_args, daemon=True).start()
    try:
        _serve(connection, frames, config, rank, init_method)
    except Exception as exc:
        fault = wire.RankFault(
            error=exc if isinstance(exc, VllmError) else None,
            summary=f"{type(exc).__name__}: {exc}",
            traceback=traceback.format_exc(),
            time_s=time.monotonic(),
        )
        connection.send_bytes(wire.pack(wire.ERROR, fault))
        os._exit(1)  # without waiting for peers that will never answer


def _serve(
    connection: Connection,
    frames: SimpleQueue[bytes],
    config: EngineConfig,
    rank: int,
    init_method: str,
) -> None:
    if rank != 0:
        logging.getLogger("vllm").setLevel(logging.ERROR)  # rank 0 says it once
        config = replace(config, load_config=replace(config.load_config, use_tqdm=False))
    parallel = config.parallel_config
    tp = TensorParallel.connect(
        rank,
        parallel.tensor_parallel_size,
        init_method,
        config.device_config.device,
        has_custom_all_reduce=not parallel.disable_custom_all_reduce,
    )
    if config.device_config.device == "cuda":
        from vllm.worker.gpu_setup import share_cache_folder  # noqa: PLC0415  brings Triton along

        share_cache_folder(find_rank_folder(init_method))
    worker = Worker(config, tp)
    connection.send_bytes(wire.pack(wire.REPORT, worker.load()))
    decode_plan = wire.make_plan_decoder(rank)
    watch = _make_watcher(frames, config.scheduler_config.max_steps_in_flight)
    steps: deque[PendingStep] = deque()
    while True:
        kind, body = wire.split(frames.get())
        if kind == wire.PLAN:
            steps.append(worker.submit(decode_plan(body)))
            watch(steps[-1])
        elif kind == _STEP_DONE:
            output = steps.popleft().wait()
            if rank == 0:
                connection.send_bytes(wire.encode_output(output))
        elif kind == wire.LAYOUT:
            worker.initialize_cache(pickle.loads(body))
            freeze_heap()
            connection.send_bytes(wire.READY)
        elif kind == wire.QUIT:
            while steps:
                steps.popleft().wait()
            gc.unfreeze()
            worker.close()
            return
        else:
            raise AssertionError(f"unknown frame {kind!r}")


def find_rank_folder(init_method: str) -> Path:
    """Return the folder of compiled kernels beside the file by which the ranks meet.

    The engine removes it with the file, also if a rank was killed.
    """
    return _find_folder(init_method) / "triton"


def _find_folder(init_method: str) -> Path:
    """Return the folder that the engine made for its ranks alone, which may be removed with all."""
    url = urlsplit(init_method)
    assert url.scheme == "file", f"ranks of one host meet at a file, not at {init_method}"
    return Path(unquote(url.path)).parent


def _make_watcher(
    frames: SimpleQueue[bytes], max_steps_in_flight: int
) -> Callable[[PendingStep], None]:
    """Return what puts a frame between those of the engine when a step is done.

    With overlap a thread waits for the device, so that the worker's own thread can start the next
    step meanwhile. Without it there is nothing else to do.
    """
    if max_steps_in_flight == 1:
        return lambda step: frames.put(_STEP_DONE)
    started: SimpleQueue[PendingStep] = SimpleQueue()

    def watch_steps() -> None:
        while True:
            with contextlib.suppress(Exception):  # its `wait` raises that
                started.get().synchronize()
            frames.put(_STEP_DONE)

    threading.Thread(target=watch_steps, name="watch-steps", daemon=True).start()
    return started.put


def _read_frames(connection: Connection, frames: SimpleQueue[bytes], folder: Path) -> None:
    """Take frames in as they come, so that neither side ever waits for the other to read.

    When the engine's end closes, this process ends, whatever it is doing. An engine that was killed
    could not remove the ranks' folder.
    """
    try:
        while True:
            frames.put(connection.recv_bytes())
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
