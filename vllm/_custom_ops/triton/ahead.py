"""Kernels compiled side by side, before they are launched for the first time.

Called by `worker/gpu_warmup.py`, which runs the kinds of steps that a server will see while their
launches are only noted here; what was noted and is not yet in Triton's cache on disk is compiled by
several processes (`compiler_process.py`), which leave it there. Compiled one after the other, as
they are first launched, the kernels of a model take a minute, and one that is first needed in the
middle of serving stops every request for seconds. All of this only saves time: a kernel that is
missed here is compiled when it is launched.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.driver import driver

from vllm._custom_ops.triton.launch import FastKernel, divert_launches
from vllm.logger import init_logger

logger = init_logger(__name__)

_PROGRAM = """
import json, sys
sys.path[:], *target = json.loads(sys.argv[1])
from vllm._custom_ops.triton.compiler_process import serve
serve(*target)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNote:
    """One compilation, as another process can repeat it.

    Attributes:
        module, name: where the kernel is defined, and its name there.
        data: Triton's own description of the specialisation, JSON.
    """

    module: str
    name: str
    data: str


class _Notes:
    """Takes launches and keeps what Triton would compile for them, each once."""

    def __init__(self) -> None:
        self.missing: set[KernelNote] = set()
        self._seen: set[tuple[FastKernel, Any]] = set()

    def take(
        self, kernel: FastKernel, key: Any, args: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """See LaunchNotes."""
        if (kernel, key) in self._seen:
            return
        self._seen.add((kernel, key))
        with kernel.compiled_in():
            kernel.jit.run(*args, grid=None, warmup=True, **constants)

    def add(self, *, fn: Any, compile: Mapping[str, Any], **_: Any) -> bool:
        """Keep a compilation; a hook of Triton's, which does not compile where it returns True."""
        jit = fn.jit_function
        source = ASTSource(jit, compile["signature"], compile["constants"], compile["configs"][0])
        data = compile["specialization_data"]
        if not _is_on_disk(source, data):
            self.missing.add(KernelNote(module=jit.module, name=jit.__name__, data=data))
        return True


@contextmanager
def note_kernels() -> Iterator[list[KernelNote]]:
    """Launch nothing inside; afterwards the list has what would have been compiled.

    What a launch should have written is left as it was, so that nothing inside may read it back.
    """
    found: list[KernelNote] = []
    notes = _Notes()
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = notes.add
    try:
        with divert_launches(notes):
            yield found
    finally:
        knobs.runtime.jit_cache_hook = before
    found += sorted(notes.missing, key=lambda note: (note.module, note.data))


def compile_kernels(notes: Sequence[KernelNote], *, max_processes: int) -> None:
    """Compile into Triton's cache on disk, side by side; what fails is left to its first launch."""
    if not notes:
        return
    started_s = time.perf_counter()
    num_processes = min(max_processes, len(notes))
    shares = [iter(notes)] * num_processes  # one iterator: whoever is free takes the next
    with ThreadPoolExecutor(num_processes) as threads:
        failures = [line for lines in threads.map(_compile_share, shares) for line in lines]
    for failure in failures:
        logger.warning("a kernel was not compiled ahead: %s", failure)
    logger.info(
        "Compiled %d kernels in %d processes in %.2f s",
        len(notes) - len(failures),
        num_processes,
        time.perf_counter() - started_s,
    )


def _compile_share(notes: Iterator[KernelNote]) -> list[str]:
    """Feed one process until nothing is left; return what went wrong."""
    target = driver.active.get_current_target()
    arguments = json.dumps([sys.path, target.backend, target.arch, target.warp_size])
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    failures = []
    with process:
        for note in notes:
            try:
                process.stdin.write(json.dumps(asdict(note)) + "\n")
                process.stdin.flush()
                reply = json.loads(process.stdout.readline() or '"the compiling process has died"')
            except OSError as error:
                reply = str(error)
            if reply:
                failures.append(f"{note.name}: {reply}")
        process.stdin.close()
    return failures


def _is_on_disk(source: ASTSource, data: str) -> bool:
    """Whether Triton's cache has a kernel."""
    backend = make_backend(driver.active.get_current_target())
    given = json.loads(data)["options"]
    options = backend.parse_options(
        {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    )
    key = get_cache_key(source, backend, options, get_cache_invalidating_env_vars())
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return f"{source.name}.json" in (manager.get_group(f"{source.name}.json") or {})
