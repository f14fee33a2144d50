"""Which ops Triton serves on a GPU, and their registration with torch's dispatcher.

Called by the worker once, where the model is on a GPU. A kernel module gives `OPS`, name to
function with the op's own signature, and `SCHEMAS`, name to torch schema of those ops that exist on
a GPU only. A new module is a file plus a row here. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch

from vllm.errors import KernelError

MODULES = (
    "batch",
    "attention",
    "latent",
    "linear",
    "moe",
    "causal_conv",
    "delta_rule",
    "gated_norm",
    "mamba2",
)
"""Modules of this package that hold kernels."""

_NAMESPACE = "_C"
_LIBRARIES: list[torch.library.Library] = []  # a registration lives as long as its library object


@cache
def register_triton_ops() -> None:
    """Register every op of every module for CUDA tensors; the C++ schemas must be loaded before.

    Raises:
        KernelError: Triton is missing or broken.
    """
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise KernelError(
            f"a GPU needs Triton, which cannot be imported ({error}); install the triton that "
            f"belongs to torch {torch.__version__}, or use --device cpu"
        ) from error
    definitions = torch.library.Library(_NAMESPACE, "FRAGMENT")
    kernels = torch.library.Library(_NAMESPACE, "IMPL", "CUDA")
    for module in import_kernels():
        for schema in module.SCHEMAS.values():
            definitions.define(schema)
        for op, function in module.OPS.items():
            kernels.impl(op, function)
    _LIBRARIES.extend((definitions, kernels))


def import_kernels() -> list[ModuleType]:
    """Return the modules that hold kernels; nothing of them has been compiled before."""
    modules = [importlib.import_module(f"vllm._custom_ops.triton.{name}") for name in MODULES]
    importlib.import_module("vllm._custom_ops.triton.launch").fix_cache_keys()
    return modules
