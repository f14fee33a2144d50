"""Stand-ins for Triton's driver and compiler: an sm_90 whose launches are written down."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime.driver import driver


class Launcher:
    """What a compiled kernel is launched by; keeps what it is given."""

    launches: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        addresses = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args[9:]]
        self.launches.append((id(self), *args[:6], *addresses))


class _Utils:
    def load_binary(self, *args: Any) -> tuple[int, int, int, int, int]:
        return 1, 2, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 17}


class Driver:
    """Triton's view of the GPU."""

    launcher_cls = Launcher
    utils = _Utils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 17

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return (9, 0)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton see this GPU for one test."""
    monkeypatch.setattr(driver, "_active", Driver())
    # Triton keeps the first answer for good: a real GPU would have this one's after the test.
    monkeypatch.setattr(compiler, "max_shared_mem", compiler.max_shared_mem.__wrapped__)


class Compiled:
    """A compiled kernel of `compile_nothing`."""

    function = 2
    packed_metadata = (4, 1, 0)

    def __init__(self) -> None:
        self.run = Launcher(None, None)

    def launch_metadata(self, *args: Any) -> None:
        """Return what hooks are told."""


def compile_nothing(source: Any, target: Any, options: Any) -> Compiled:
    """Take the place of Triton's compiler."""
    return Compiled()
