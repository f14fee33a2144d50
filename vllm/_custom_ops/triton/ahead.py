"""Kernels noted before they are launched for the first time, so that all are compiled at once.

Called by `worker/gpu_kernels.py`, which runs the kinds of steps that a server will see while their
launches are only noted here; what was noted and is not yet in Triton's cache on disk is compiled
side by side (`compiler.py`). Compiled one after the other, as they are first launched, the kernels
of a model take half a minute, and one that is first needed in the middle of serving stops every
request for a second. All of this only saves time: a kernel that is missed here is compiled when it
is launched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.driver import driver

from vllm._custom_ops.triton.launch import FastKernel, divert_launches


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
        source = jit.ASTSource(
            jit, compile["signature"], compile["constants"], compile["configs"][0]
        )
        data = compile["specialization_data"]
        if not _is_on_disk(source, data):
            self.missing.add(KernelNote(module=jit.module, name=jit.__name__, data=data))
        return True


@contextmanager
def note_kernels() -> Iterator[list[KernelNote]]:
    """Launch nothing inside; afterwards the list has what would have been compiled.

    What a launch should have written is left as it was, so that nothing inside may read it back.
    Those that take longest come first, by the best guess there is: how much there is to say of one.
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
    found += sorted(notes.missing, key=lambda note: (-len(note.data), note.data))


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
