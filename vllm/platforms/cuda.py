"""CUDA devices through torch.

Called by the worker where the model is on a GPU. Imports torch when a device is asked for, never at
import.
"""

from __future__ import annotations

from typing import ClassVar

from vllm.platforms.interface import MemoryInfo, Platform


class CudaPlatform(Platform):
    """NVIDIA GPUs."""

    device_type: ClassVar[str] = "cuda"

    def get_device_name(self, index: int = 0) -> str:
        """Return the name of a GPU."""
        import torch  # noqa: PLC0415  importing the platform must not import torch

        return str(torch.cuda.get_device_name(index))

    def get_device_capability(self, index: int = 0) -> tuple[int, int] | None:
        """Return the compute capability, such as (9, 0)."""
        import torch  # noqa: PLC0415

        return torch.cuda.get_device_capability(index)

    def get_memory(self, index: int = 0) -> MemoryInfo:
        """Return the memory of a GPU, other processes' share counted as used."""
        import torch  # noqa: PLC0415

        free, total = torch.cuda.mem_get_info(index)
        return MemoryInfo(total_bytes=total, free_bytes=free)
