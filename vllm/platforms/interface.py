"""What the engine asks of the machine it runs on.

`current_platform` (in the package) is one of these. Nothing here imports torch before a device is
asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """Memory of a device, in bytes, as all processes on it see it."""

    total_bytes: int
    free_bytes: int


class Platform(ABC):
    """One kind of device.

    Attributes:
        device_type: torch's name of it.
    """

    device_type: ClassVar[str]

    def is_cpu(self) -> bool:
        """Whether this is the CPU."""
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        """Whether this is a CUDA device."""
        return self.device_type == "cuda"

    @abstractmethod
    def get_device_name(self, index: int = 0) -> str:
        """Return what the maker calls the device."""

    @abstractmethod
    def get_device_capability(self, index: int = 0) -> tuple[int, int] | None:
        """Return the compute capability, None where there is no such thing."""

    @abstractmethod
    def get_memory(self, index: int = 0) -> MemoryInfo:
        """Return the device's memory right now."""
