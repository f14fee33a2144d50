"""Loads the compiled ops on first use and turns their argument errors into ShapeError.

The doors of this package call ops through :data:`C` and :data:`CACHE_OPS`. A missing or broken
extension is one clear KernelError; nothing here ever falls back to slow code.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllm.errors import KernelError, ShapeError

_FOLDER = Path(__file__).resolve().parent.parent
_CPU_LIBRARY = _FOLDER / "_C_cpu.abi3.so"
_CUDA_LIBRARY = _FOLDER / "_C_cuda.abi3.so"
_SHAPE_MARK = "[shape] "
_OLDEST_TORCH = (2, 11)
_HOW_TO_BUILD = "build it with `pip install -e .` (or `make build`) in the source tree"
_HOW_TO_BUILD_CUDA = (
    "torch finds a CUDA device, so build both libraries with "
    "`VLLM_TARGET_DEVICE=cuda pip install -e .` in the source tree, which needs nvcc; to serve "
    "from the processor alone, hide the devices with CUDA_VISIBLE_DEVICES="
)


class OpNamespace:
    """The ops of one torch namespace; the extension is loaded at the first attribute access."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, op: str) -> Callable[..., Any]:
        load_extension()
        call = _with_shape_errors(getattr(getattr(torch.ops, self._name), op).default)
        setattr(self, op, call)  # the next access finds it without this function
        return call


C = OpNamespace("_C")
CACHE_OPS = OpNamespace("_C_cache_ops")

CPU_ISAS = ("avx2", "avx512", "avx512_bf16")


def cpu_isa() -> str:
    """Return the instruction set in use: one of CPU_ISAS."""
    return CPU_ISAS[C.cpu_isa()]


def available_cpu_isas() -> tuple[str, ...]:
    """Return the instruction sets that this processor has, slowest first."""
    return CPU_ISAS[: C.best_cpu_isa() + 1]


def set_cpu_isa(name: str) -> None:
    """Use another instruction set from now on; for tests and benchmarks."""
    C.set_cpu_isa(CPU_ISAS.index(name))


@functools.cache
def load_extension() -> None:
    """Load the CPU ops once, and the CUDA ops where torch finds a CUDA device.

    Raises:
        KernelError: a file is missing or truncated, cannot be loaded, or uses another OpenMP
            runtime than torch.
    """
    _load(_CPU_LIBRARY, _HOW_TO_BUILD)
    try:
        ours, theirs = torch.ops._C.openmp_runtimes()
        torch.ops._C.best_cpu_isa()  # raises if the processor cannot run the ops at all
    except (RuntimeError, AttributeError) as error:
        raise _refuse(_CPU_LIBRARY, error, _HOW_TO_BUILD) from error
    if ours != theirs:
        raise KernelError(
            f"two OpenMP runtimes in one process: the compiled ops use {ours}, torch uses "
            f"{theirs}. Import torch before libraries that bring their own OpenMP, and preload at "
            "most one"
        )
    if torch.cuda.is_available():
        _load(_CUDA_LIBRARY, _HOW_TO_BUILD_CUDA)


def _load(library: Path, how_to_build: str) -> None:
    """Load one library of ops; KernelError says what is wrong with it and what to do."""
    if not library.is_file():
        raise KernelError(f"the compiled ops {library} are missing; {how_to_build}")
    found = torch.__version__
    release = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if release < _OLDEST_TORCH:
        raise KernelError(
            f"torch {found} is too old for the compiled ops; install torch >= "
            f"{'.'.join(map(str, _OLDEST_TORCH))}"
        )
    try:
        _check_complete(library)
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:
        raise _refuse(library, error, how_to_build) from error


def _refuse(library: Path, error: Exception, how_to_build: str) -> KernelError:
    return KernelError(
        f"the compiled ops {library} cannot be loaded: {error}. They were built with torch "
        f"{_built_for_torch(library)}, this process has torch {torch.__version__}; {how_to_build}"
    )


def _check_complete(library: Path) -> None:
    """Raise OSError if the end of the file is cut off; the system's loader would die of SIGBUS.

    An ELF file ends with its section table, whose place and size stand in the header.
    """
    size = library.stat().st_size
    with library.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        raise OSError(f"it is no shared library; the file has {size} bytes")
    table_offset = struct.unpack_from("<Q", header, 0x28)[0]
    entry_size, num_entries = struct.unpack_from("<HH", header, 0x3A)
    expected = table_offset + entry_size * num_entries
    if size < expected:
        raise OSError(f"it is truncated: {size} bytes of at least {expected}")


def _built_for_torch(library: Path) -> str:
    """Return the torch version named inside the library file, which may be unloadable."""
    match = re.search(rb"VLLM_BUILT_FOR_TORCH=([^;\0]+);", library.read_bytes())
    return match.group(1).decode() if match else "unknown"


def _with_shape_errors(op: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `op` so that a failed argument check raises ShapeError."""

    def call(*args: Any) -> Any:
        try:
            return op(*args)
        except RuntimeError as error:
            _, mark, text = str(error).partition(_SHAPE_MARK)
            if not mark:
                raise
            raise ShapeError(text.splitlines()[0]) from None

    return call
