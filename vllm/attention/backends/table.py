"""The attention kernels there are: one row each, in order of preference for each device.

Read by the selector and by `PagedAttention`. A new backend is a file plus a row here. Modules are
imported when a kernel is asked for, never at import of this file.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from vllm.attention.backends.abstract import AttentionBackend
from vllm.errors import KernelError


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One kernel name.

    Attributes:
        module: "module:Class".
        devices: device types that it runs on, for the refusal before anything is imported.
        package: (import name, distribution name) of an optional package that it needs.
        env_names: values of VLLM_ATTENTION_BACKEND (those of 0.6.3) that mean it.
        rank: preference for each device under "auto", the lowest first; absent = never by itself.
    """

    name: str
    module: str
    devices: tuple[str, ...]
    package: tuple[str, str] | None = None
    env_names: tuple[str, ...] = ()
    rank: tuple[tuple[str, int], ...] = ()


KERNELS: dict[str, KernelRow] = {
    row.name: row
    for row in (
        KernelRow(
            name="cpu",
            module="vllm.attention.backends.cpu:CpuBackend",
            devices=("cpu",),
            rank=(("cpu", 0),),
        ),
        KernelRow(
            name="flashattn3",
            module="vllm.attention.backends.flash_attn3:FlashAttn3Backend",
            devices=("cuda",),
            package=("flash_attn_interface", "flash-attn-3"),
            rank=(("cuda", 0),),
        ),
        KernelRow(
            name="flashattn",
            module="vllm.attention.backends.flash_attn:FlashAttnBackend",
            devices=("cuda",),
            package=("flash_attn", "flash-attn"),
            env_names=("FLASH_ATTN",),
            rank=(("cuda", 1),),
        ),
        KernelRow(
            name="triton",
            module="vllm.attention.backends.triton:TritonBackend",
            devices=("cuda",),
            package=("triton", "triton"),
            rank=(("cuda", 2),),
        ),
        KernelRow(
            name="xformers",
            module="vllm.attention.backends.xformers:XformersBackend",
            devices=("cuda",),
            package=("xformers", "xformers"),
            env_names=("XFORMERS",),
            rank=(("cuda", 3),),
        ),
        KernelRow(
            name="torch",
            module="vllm.attention.backends.torch_sdpa:TorchBackend",
            devices=("cpu", "cuda"),
            env_names=("TORCH_SDPA",),
            rank=(("cpu", 9), ("cuda", 9)),
        ),
    )
}

FOREIGN_ENV_NAMES = ("ROCM_FLASH", "OPENVINO", "FLASHINFER", "PALLAS", "IPEX", "NO_ATTENTION")
"""Backends of 0.6.3 that this project does not have."""


def rank_kernels(device: str) -> tuple[str, ...]:
    """Return the kernels that "auto" tries on a device, best first."""
    ranked = [
        (dict(row.rank)[device], name) for name, row in KERNELS.items() if device in dict(row.rank)
    ]
    return tuple(name for _, name in sorted(ranked))


def find_package_fault(row: KernelRow) -> tuple[str, bool] | None:
    """Import the optional package of a row.

    Returns:
        None if the row needs none or it imports; else (reason, is_broken), where broken means
        installed but failing to import, as a package built for another torch does.
    """
    if row.package is None:
        return None
    import_name, distribution = row.package
    try:
        importlib.import_module(import_name)
    except ModuleNotFoundError as exc:
        if exc.name == import_name:
            return f"the package {distribution} is not installed", False
        return _describe_fault(row, exc), True
    except Exception as exc:  # an extension of the wrong ABI raises ImportError, OSError or worse
        return _describe_fault(row, exc), True
    return None


def _describe_fault(row: KernelRow, exc: Exception) -> str:
    assert row.package is not None
    _, distribution = row.package
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    return f"the package {distribution} {version} fails to import: {type(exc).__name__}: {exc}"


@cache
def load_backend(name: str) -> AttentionBackend:
    """Return the backend of a kernel name; KernelError if this version has none."""
    row = KERNELS.get(name)
    if row is None:
        raise KernelError(
            f"attention kernel {name!r} is not part of this version; there are: "
            + ", ".join(KERNELS)
        )
    module, cls = row.module.split(":")
    backend: AttentionBackend = getattr(importlib.import_module(module), cls)()
    return backend
