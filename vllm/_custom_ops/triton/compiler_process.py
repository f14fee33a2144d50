"""A process that compiles Triton kernels for a GPU which it never touches.

Started by `ahead.py`. Each line of its input is a KernelNote in JSON; each line of its output is
an error text, or empty where the kernel, and the C code that launches it, are in Triton's cache on
disk. It ends with its input.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.driver import driver

from vllm._custom_ops.triton.table import import_kernels


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


def compile_note(note: dict[str, Any]) -> None:
    """Compile one kernel and its launcher."""
    kernel = getattr(importlib.import_module(note["module"]), note["name"])
    with kernel.compiled_in():
        compiled = kernel.jit.preload(note["data"])
    with suppress(AssertionError):  # Triton's where there is no libcuda: in tests
        CudaLauncher(compiled.src, compiled.metadata)


def serve(backend: str, arch: int, warp_size: int) -> None:
    """Compile for a GPU what is asked for, until the input ends."""
    driver.set_active(StandInDriver(GPUTarget(backend, arch, warp_size)))
    import_kernels()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what others print is no reply
    for line in sys.stdin:
        reply = ""
        try:
            compile_note(json.loads(line))
        except Exception as error:  # whatever it is, the launch will meet it again
            reply = f"{type(error).__name__}: {error}"
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
