"""The process that compiles Triton kernels for a GPU which it never touches.

Started by `compiler.py`. Its input is one request, a line of JSON; for each kernel it answers a
line: the place in the request and what went wrong, empty where the kernel, and the C code that
launches it, are in Triton's cache on disk. Each is compiled in a fork of its own: imports are paid
for once, and one that dies takes no other along. When the input ends, so does everything here.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, library_dirs
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver

from vllm._custom_ops.triton.table import import_kernels

_INPUT = 0
_MOST_EXPENDABLE = 1000
_MAX_TEXT_BYTES = 4000
"""Of what went wrong; a pipe takes as much at once."""


class StandInDriver:
    """Says which GPU the kernels are for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        """Return the GPU."""
        return self._target

    def get_current_device(self) -> int:
        """Return the place of the GPU among the others."""
        return 0


@dataclass(slots=True, kw_only=True)
class _Fork:
    """A kernel that is being compiled.

    Attributes:
        place: in the request.
        text: what has gone wrong, as far as it was said.
    """

    place: int
    pid: int
    text: bytes = b""


def compile_note(note: Mapping[str, Any]) -> None:
    """Compile one kernel and its launcher."""
    kernel = getattr(importlib.import_module(note["module"]), note["name"])
    with kernel.compiled_in():
        compiled = kernel.jit.preload(note["data"])
    with suppress(AssertionError):  # Triton's where there is no libcuda: in tests
        CudaLauncher(compiled.src, compiled.metadata)


def compile_notes(
    notes: Sequence[Mapping[str, Any]], max_processes: int
) -> Iterator[tuple[int, str]]:
    """Compile kernels side by side; yield the place of each and what went wrong, as they end."""
    waiting = deque(enumerate(notes))
    forks: dict[int, _Fork] = {}  # by the pipe on which they tell
    while waiting or forks:
        while waiting and len(forks) < max_processes:
            pipe, fork = _start_fork(*waiting.popleft())
            forks[pipe] = fork
        for pipe in select.select([_INPUT, *forks], [], [])[0]:
            if pipe == _INPUT:  # nothing more is sent: it has ended, and nobody waits
                os.killpg(0, signal.SIGKILL)
            elif chunk := os.read(pipe, _MAX_TEXT_BYTES):
                forks[pipe].text += chunk
            else:
                os.close(pipe)
                fork = forks.pop(pipe)
                yield fork.place, _describe_end(fork)


def _start_fork(place: int, note: Mapping[str, Any]) -> tuple[int, _Fork]:
    pipe, end = os.pipe()
    pid = os.fork()
    if not pid:
        _compile_and_exit(note, end)
    os.close(end)
    return pipe, _Fork(place=place, pid=pid)


def _compile_and_exit(note: Mapping[str, Any], pipe: int) -> NoReturn:
    status = 1
    try:
        compile_note(note)
        status = 0
    except Exception as error:  # whatever it is, the launch will meet it again
        text = f"{type(error).__name__}: {error}"
        os.write(pipe, text.encode(errors="replace")[:_MAX_TEXT_BYTES])
    finally:
        os._exit(status)


def _describe_end(fork: _Fork) -> str:
    status = os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])
    if status < 0:
        return f"its process was killed by {signal.Signals(-status).name}"
    if status and not fork.text:
        return f"its process ended with status {status}"
    return fork.text.decode(errors="replace")


def _go_first() -> None:
    """Have Linux end this process and its forks, not the engine, where memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(f"{_MOST_EXPENDABLE}")


def serve() -> None:
    """Compile what the input asks for; returns when that is done or the input has ended."""
    _go_first()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what others print is no reply
    import_kernels()
    triton_key()  # reads all of Triton, which forks then need not
    with suppress(AssertionError, OSError, subprocess.SubprocessError):  # no libcuda: in tests
        library_dirs()
    line = sys.stdin.buffer.readline()
    if not line:
        return
    request = json.loads(line)
    driver.set_active(StandInDriver(GPUTarget(*request["target"])))
    gc.freeze()  # forks share what there is
    for answer in compile_notes(request["notes"], request["max_processes"]):
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
