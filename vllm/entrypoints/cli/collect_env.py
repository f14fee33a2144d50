"""`vllm collect-env`: the whole chain from the driver to our own ops, each row with its mend.

A row is ok, wrong, missing (optional), or not needed on this machine. Wrong rows make the exit
status 1.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module, metadata
from typing import Any, Literal

import psutil
from packaging.requirements import Requirement

from vllm.utils.argument_parser import FlexibleArgumentParser
from vllm.version import __version__

_REBUILD = "build them again: make build (or pip install .) in the source tree"

Status = Literal["ok", "wrong", "missing", "not needed"]

_DISTRIBUTION = "vllm-hybrid"
_TESTED_TRITON = "3.6"
"""The one whose insides `vllm/_custom_ops/triton/launch.py` knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One part of the chain.

    Attributes:
        found: its version, or what was seen of it.
        mend: what to do, empty if nothing.
    """

    name: str
    status: Status
    found: str = ""
    mend: str = ""


def main(argv: Sequence[str]) -> int:
    """Print the table; returns 1 if a row is wrong."""
    parser = FlexibleArgumentParser(
        prog="vllm collect-env", description="Check drivers, libraries and compiled ops."
    )
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    args = parser.parse_args(argv)
    rows = list(collect_rows())
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print("\n".join(format_rows(rows)))
    return int(any(row.status == "wrong" for row in rows))


def format_rows(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table, a mend below its row."""
    width = max(len(row.name) for row in rows)
    for row in rows:
        yield f"{row.name:<{width}}  {row.status:<10}  {row.found}"
        if row.mend:
            yield f"{'':<{width}}  -> {row.mend}"


def collect_rows() -> Iterator[Row]:
    """Yield the rows, the machine first, our own ops last."""
    yield Row(name="vllm-hybrid", status="ok", found=__version__)
    yield _check_python()
    yield Row(name="platform", status="ok", found=platform.platform())
    yield Row(name="cpu", status="ok", found=_describe_cpu())
    yield Row(name="memory", status="ok", found=f"{psutil.virtual_memory().total / 2**30:.1f} GiB")
    torch = _guard("torch", _import_torch)
    if isinstance(torch, Row):
        yield torch
    else:
        yield from _check_torch(torch)
    yield from _check_libraries()
    yield from _check_ops()


def _check_python() -> Row:
    found = f"{platform.python_version()} ({sys.executable})"
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Row(name="python", status="wrong", found=found, mend="use Python 3.11, 3.12 or 3.13")
    return Row(name="python", status="ok", found=found)


def _describe_cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            text = file.read()
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    flags = set((re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE) or [""])[0].split())
    known = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    cores = len(os.sched_getaffinity(0))
    name = model[1] if model else platform.machine()
    return f"{name}, {cores} cores, {' '.join(known) or 'no AVX2'}"


def _guard(name: str, work: Callable[[], Any]) -> Any:
    """Return what `work` returns, or a row that says why it failed."""
    try:
        return work()
    except ImportError as cause:
        status: Status = "missing" if isinstance(cause, ModuleNotFoundError) else "wrong"
        return Row(name=name, status=status, found=str(cause), mend=f"pip install {name}")
    except Exception as cause:  # a broken library may raise anything
        return Row(name=name, status="wrong", found=repr(cause), mend=f"reinstall {name}")


def _import_torch() -> Any:
    return import_module("torch")


def _check_torch(torch: Any) -> Iterator[Row]:
    yield Row(name="torch", status="ok", found=torch.__version__)
    built_for = torch.version.cuda
    driver = _find_driver()
    if built_for is None:
        mend = ""
        if driver is not None:
            mend = "a GPU is here, but this torch is for CPUs: install a CUDA build to use it"
        yield Row(
            name="cuda driver",
            status="not needed",
            found=driver or "none; torch is built for CPUs",
            mend=mend,
        )
        return
    yield _check_driver(torch, driver, built_for)
    yield Row(name="cuda runtime", status="ok", found=f"{built_for} (torch's own)")
    cudnn = torch.backends.cudnn.version()
    yield Row(
        name="cudnn",
        status="missing" if cudnn is None else "ok",
        found=str(cudnn or ""),
        mend="" if cudnn else "pip install nvidia-cudnn of torch's CUDA version",
    )
    yield from _check_gpus(torch)
    yield _check_triton()
    yield _check_optional("flash_attn", "prefill on GPUs is slower without it")


def _find_driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.split()
    return lines[0] if lines else None


def _check_driver(torch: Any, driver: str | None, built_for: str) -> Row:
    if torch.cuda.is_available():
        return Row(name="cuda driver", status="ok", found=driver or "present")
    if driver is None:
        return Row(
            name="cuda driver",
            status="missing",
            found="no nvidia-smi",
            mend="install NVIDIA's driver, or torch for CPUs",
        )
    return Row(
        name="cuda driver",
        status="wrong",
        found=f"{driver}, but torch cannot use it",
        mend=f"update the driver to one for CUDA {built_for}, or install torch for an older CUDA",
    )


def _check_gpus(torch: Any) -> Iterator[Row]:
    if not torch.cuda.is_available():
        return
    built = set(torch.cuda.get_arch_list())
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found = f"{facts.name}, {facts.major}.{facts.minor}, {facts.total_memory / 2**30:.0f} GiB"
        if facts.major < 8:
            yield Row(
                name=f"gpu {index}",
                status="wrong",
                found=found,
                mend="8.0 (Ampere) or later is needed",
            )
        elif not any(arch.startswith(f"sm_{facts.major}") for arch in built):
            yield Row(
                name=f"gpu {index}",
                status="wrong",
                found=f"{found}; torch is built for {', '.join(sorted(built))}",
                mend="install a torch built for this GPU",
            )
        else:
            yield Row(name=f"gpu {index}", status="ok", found=found)


def _check_triton() -> Row:
    row = _check_optional("triton", "kernels written in Triton are not used without it")
    if row.status != "ok" or row.found.startswith(f"{_TESTED_TRITON}."):
        return row
    mend = f"slower: kernels for Hopper and compiling ahead need {_TESTED_TRITON}, torch 2.11's"
    return replace(row, mend=mend)


def _check_optional(module: str, without: str) -> Row:
    name = module.replace("_", "-")
    found = _guard(name, lambda: import_module(module))
    if not isinstance(found, Row):
        return Row(name=name, status="ok", found=str(found.__version__))
    if found.status == "missing":
        return Row(name=name, status="missing", found="", mend=f"optional: {without}")
    mend = f"built for another torch: uninstall {name}, or build it against this one"
    return Row(name=name, status="wrong", found=found.found, mend=mend)


def _check_libraries() -> Iterator[Row]:
    """Compare what is installed with what the distribution asks for."""
    try:
        wanted = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield Row(
            name="distribution",
            status="missing",
            found=f"{_DISTRIBUTION} runs from a source tree that is not installed",
            mend="pip install -e .",
        )
        return
    for requirement in map(Requirement, wanted):
        is_for_us = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_for_us and requirement.name != "torch":
            yield _check_library(requirement)


def _check_library(requirement: Requirement) -> Row:
    mend = f"pip install '{requirement}'"
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Row(name=requirement.name, status="wrong", found="not installed", mend=mend)
    if not requirement.specifier.contains(found, prereleases=True):
        return Row(name=requirement.name, status="wrong", found=found, mend=mend)
    return Row(name=requirement.name, status="ok", found=found)


def _check_ops() -> Iterator[Row]:
    """Load our own ops and compare one of them with its naive twin."""
    try:
        library = import_module("vllm._custom_ops.library")
        library.load_extension()
        isa = library.cpu_isa()
        fault = _compare_with_naive()
    except Exception as cause:  # whatever stops them is the row's content
        yield Row(name="compiled ops", status="wrong", found=str(cause), mend=_REBUILD)
        return
    if fault:
        yield Row(name="compiled ops", status="wrong", found=fault, mend=_REBUILD)
    else:
        yield Row(name="compiled ops", status="ok", found=f"CPU ops, {isa}")


def _compare_with_naive() -> str:
    """Return what differs between an op and its twin, or nothing."""
    torch = import_module("torch")
    door = import_module("vllm._custom_ops.norm").rms_norm
    naive = import_module("vllm._custom_ops.naive.norm").rms_norm
    rows = torch.linspace(-2.0, 2.0, 3 * 64).reshape(3, 64)
    weight = torch.linspace(0.5, 1.5, 64)
    outs = []
    for op in (door, naive):
        out = torch.full_like(rows, float("nan"))
        op(out, rows, weight, 1e-5)
        outs.append(out)
    gap = float((outs[0] - outs[1]).abs().max())
    return "" if gap < 1e-5 else f"rms_norm differs from its naive twin by {gap:.1e}"
