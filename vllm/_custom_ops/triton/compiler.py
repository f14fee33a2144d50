"""What lets Triton kernels be compiled side by side, by a process that never sees the GPU.

Made by `worker/gpu_kernels.py` for the time of a start. Whatever goes wrong here costs time only: a
kernel that was not compiled is compiled when it is first launched, and a line of the log says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from triton import knobs
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver

from vllm import envs
from vllm._custom_ops.triton.ahead import KernelNote
from vllm.logger import init_logger

logger = init_logger(__name__)

_PROGRAM = (
    "import sys; sys.path[:] = {path!r}\n"
    "from vllm._custom_ops.triton.compiler_process import serve\n"
    "serve()"
)
_MAX_PROCESSES = 32
_SPARE_PROCESSORS = 2
"""With more processors than these the imports of another process hold nobody up."""

_FEW_KERNELS = 2
"""Compiled in about the time in which a process starts."""

_MAX_S = 300.0
"""Well below the time after which ranks that wait give each other up."""


class KernelCompiler:
    """Compiles kernels on all processors; a context manager that leaves no process behind.

    Its process starts right away where Triton's cache is empty, so that it is ready when there is
    something to compile, and else when it is needed.

    Args:
        starts_early: whether there will be something to compile, as far as is known.
        max_s: seconds after which what is not done is given up.
    """

    def __init__(self, *, starts_early: bool = True, max_s: float = _MAX_S) -> None:
        self._starts_early = starts_early
        self._max_s = max_s
        self._num_processors = len(os.sched_getaffinity(0))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> KernelCompiler:
        threading.Thread(target=_make_ready, daemon=True).start()
        has_room = self._num_processors > _SPARE_PROCESSORS
        if self._starts_early and has_room and is_cache_empty():
            self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def compile(self, notes: Sequence[KernelNote]) -> None:
        """Compile kernels into Triton's cache on disk, side by side."""
        if self._process is None:
            if len(notes) <= _FEW_KERNELS:
                return
            self._start()
        if self._process is None or not notes:
            return
        started_s = time.perf_counter()
        num_processes = min(self._num_processors, _MAX_PROCESSES, len(notes))
        ended: dict[int, str] = {}
        # It has died, or something else wrote into its answers: told below.
        with contextlib.suppress(OSError, ValueError, TypeError):
            ended |= self._ask(self._process, notes, num_processes)
        failures: dict[str, set[str]] = {}
        for place, text in ended.items():
            failures.setdefault(text, set()).add(notes[place].name)
        failures.pop("", None)
        for text, names in failures.items():
            logger.warning("not compiled ahead: %s: %s", ", ".join(sorted(names)), text)
        if len(ended) < len(notes):
            logger.warning(
                "%d kernels were not compiled ahead, but will be when they are first launched: the "
                "compiling process has ended or took longer than %.0f s",
                len(notes) - len(ended),
                self._max_s,
            )
        logger.info(
            "Compiled %d kernels in %d processes in %.2f s",
            sum(not text for text in ended.values()),
            num_processes,
            time.perf_counter() - started_s,
        )

    def close(self) -> None:
        """End what is still running."""
        if self._process is None:
            return
        process, self._process = self._process, None
        _kill(process)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # a request that nobody has read
                pipe.close()

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=envs.make_child_environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"),
                start_new_session=True,  # Ctrl-C is the engine's; all can be ended at once
            )
        except OSError as error:
            logger.warning("kernels are compiled when they are first launched: %s", error)

    def _ask(
        self, process: subprocess.Popen[bytes], notes: Sequence[KernelNote], num_processes: int
    ) -> Iterator[tuple[int, str]]:
        """Yield the place of each kernel that is done, and what went wrong."""
        assert process.stdin is not None and process.stdout is not None
        target = driver.active.get_current_target()
        request = {
            "target": [target.backend, target.arch, target.warp_size],
            "max_processes": num_processes,
            "notes": [asdict(note) for note in notes],
        }
        timer = threading.Timer(self._max_s, _kill, (process,))
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            for _ in notes:
                line = process.stdout.readline()
                if not line:
                    return
                place, text = json.loads(line)
                yield place, text
        finally:
            timer.cancel()


def is_cache_empty() -> bool:
    """Return whether no kernel was ever compiled into Triton's cache on disk."""
    try:
        return not any(Path(knobs.cache.dir).iterdir())
    except OSError:
        return True


def _make_ready() -> None:
    """Let Triton do what takes it a moment before its first kernel, and touches no device."""
    with contextlib.suppress(Exception):  # whatever it is, the first launch will meet it again
        triton_key()
        _ = driver.active


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that was not waited for, and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
