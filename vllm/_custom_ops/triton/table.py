"""Which ops Triton serves on a GPU, and their registration with torch's dispatcher.

Called by the worker once, where the model is on a GPU. A kernel module gives `OPS`, name to
function with the op's own signature, and, for ops that exist on a GPU only, `SCHEMAS`, name to
torch schema. A new module is a file plus a row here. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from functools import cache

import torch

MODULES = (
    "batch",
    "attention",
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
    """Register every op of every module for CUDA tensors; the C++ schemas must be loaded before."""
    definitions = torch.library.Library(_NAMESPACE, "FRAGMENT")
    kernels = torch.library.Library(_NAMESPACE, "IMPL", "CUDA")
    for name in MODULES:
        module = importlib.import_module(f"vllm._custom_ops.triton.{name}")
        for schema in getattr(module, "SCHEMAS", {}).values():
            definitions.define(schema)
        for op, function in module.OPS.items():
            kernels.impl(op, function)
    _LIBRARIES.extend((definitions, kernels))
