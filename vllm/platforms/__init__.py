"""The machine: `current_platform`, and one object for each kind of device.

`current_platform` is looked up when it is first read, since finding out may import torch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from vllm.errors import ConfigError
from vllm.platforms.interface import MemoryInfo, Platform

__all__ = ["MemoryInfo", "Platform", "current_platform", "detect_platform", "get_platform"]


@cache
def get_platform(device: str) -> Platform:
    """Return the platform of a device type.

    Raises:
        ConfigError: there is no such type.
    """
    if device == "cpu":
        from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415  only what is used is loaded

        return CpuPlatform()
    if device == "cuda":
        from vllm.platforms.cuda import CudaPlatform  # noqa: PLC0415

        return CudaPlatform()
    raise ConfigError(f"unknown device {device!r}; allowed are 'cpu' and 'cuda'")


@cache
def detect_platform() -> Platform:
    """Return CUDA where torch sees a GPU, else the CPU."""
    import torch  # noqa: PLC0415

    return get_platform("cuda" if torch.cuda.is_available() else "cpu")


def __getattr__(name: str) -> Any:
    if name == "current_platform":
        return detect_platform()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
