"""The CPU: its memory as this process may use it, its cores, its name.

Called by the worker and by `vllm collect-env`. Knows control groups, so that a container's limits
count and not the host's. Imports no torch.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import ClassVar

from vllm.platforms.interface import MemoryInfo, Platform

_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


class CpuPlatform(Platform):
    """The machine's processors."""

    device_type: ClassVar[str] = "cpu"

    def get_device_name(self, index: int = 0) -> str:
        """Return the model name of the first processor."""
        for line in _read(_PROC / "cpuinfo").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
        return platform.processor() or platform.machine()

    def get_device_capability(self, index: int = 0) -> tuple[int, int] | None:
        """Return None: a CPU has no compute capability."""
        return None

    def get_memory(self, index: int = 0) -> MemoryInfo:
        """Return the memory of the machine or of the control group, whichever is less."""
        sizes = {}
        for line in _read(_PROC / "meminfo").splitlines():
            name, _, rest = line.partition(":")
            sizes[name] = int(rest.split()[0]) * 1024
        total, free = sizes["MemTotal"], sizes["MemAvailable"]
        limit = _find_cgroup_limit()
        if limit is not None:
            total = min(total, limit.total_bytes)
            free = min(free, limit.free_bytes)
        return MemoryInfo(total_bytes=total, free_bytes=free)

    def list_cpus(self) -> tuple[int, ...]:
        """Return the logical processors that this process may run on."""
        return tuple(sorted(os.sched_getaffinity(0)))


def _find_cgroup_limit() -> MemoryInfo | None:
    """Return limit and room of this process's control group, or None if it has no limit."""
    for limit_file, used_file, stat_file in (
        ("memory.max", "memory.current", "memory.stat"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
        ),
    ):
        limit, used = _read(_CGROUP / limit_file).strip(), _read(_CGROUP / used_file).strip()
        if not (limit.isdigit() and used.isdigit()) or int(limit) >= 2**60:
            continue
        reclaimable = 0  # the page cache of files counts as used, but goes when memory is needed
        for line in _read(_CGROUP / stat_file).splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                reclaimable = int(value)
        free = max(0, int(limit) - int(used) + reclaimable)
        return MemoryInfo(total_bytes=int(limit), free_bytes=min(free, int(limit)))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parse a list of processors such as "0-3,6".

    Raises:
        ValueError: the text is no such list.
    """
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        cpus.extend(range(int(first), int(last if dash else first) + 1))
    return tuple(dict.fromkeys(cpus))
