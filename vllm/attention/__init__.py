"""Attention: the layer, the choice of a kernel, and the kernels."""

from __future__ import annotations

from typing import Any

__all__ = ["Attention"]


def __getattr__(name: str) -> Any:
    if name == "Attention":
        from vllm.attention.layer import Attention  # noqa: PLC0415  only the layer needs torch

        return Attention
    raise AttributeError(f"module 'vllm.attention' has no attribute {name!r}")
