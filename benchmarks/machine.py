"""Which machine and which versions a result was measured with; part of every result file."""

from __future__ import annotations

import os
import platform
from importlib import metadata


def describe_machine() -> dict[str, object]:
    """Return what a reader needs to place the figures."""
    model = "unknown"
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}


def describe_versions() -> dict[str, str]:
    """Return the versions of this project and of torch."""
    from vllm.version import __version__

    return {"vllm-hybrid": __version__, "torch": metadata.version("torch")}
