"""Which machine and which versions a result was measured with; part of every result file."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch


def describe_machine() -> dict[str, object]:
    """Return what a reader needs to place the figures."""
    model = "unknown"
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    machine: dict[str, object] = {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        machine["gpus"] = names
    return machine


def describe_versions() -> dict[str, str]:
    """Return the versions of this project, of torch and, where it is installed, of Triton."""
    from vllm.version import __version__

    versions = {"vllm-hybrid": __version__, "torch": metadata.version("torch")}
    if torch.cuda.is_available():
        versions["triton"] = metadata.version("triton")
    return versions
