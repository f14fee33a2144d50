"""What a rank says after loading its model.

Made by the worker, handed up by every executor, read by the engine to lay out the cache. Plain
data: no torch, so that messages and the engine may name it.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.cache_spec import LayerCacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKernel:
    """The kernel that serves a layer, and why another that was asked for does not."""

    layer: int
    kernel: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank says after loading the model.

    Attributes:
        cache_specs: one for each decoder layer, sizes of this rank (heads already divided).
        cache_bytes: bytes that this rank can give to the cache.
        kernels: resolved kernel of each attention layer.
        block_tokens: block sizes in tokens that the kernels of all layers take.
        weight_bytes: bytes held by weights.
    """

    rank: int
    cache_specs: tuple[LayerCacheSpec, ...]
    cache_bytes: int
    kernels: tuple[LayerKernel, ...]
    block_tokens: tuple[int, ...]
    weight_bytes: int
    load_seconds: float
