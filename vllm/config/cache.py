"""The KV cache: block size, budget, prefix reuse."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.types import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How cache memory is cut and budgeted.

    Attributes:
        block_size: tokens of a block.
        gpu_memory_utilization: share of the device's total memory this instance plans with (CUDA).
        cache_bytes: bytes of the cache of a rank; None lets the worker choose.
        cache_dtype: element type of K and V; None is the model's.
        num_gpu_blocks_override: number of blocks instead of what the budget gives.
        swap_space_bytes: accepted, not used (preemption recomputes).
    """

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    cache_bytes: int | None = None
    cache_dtype: DType | None = None
    num_gpu_blocks_override: int | None = None
    swap_space_bytes: int = 0
    enable_prefix_caching: bool = True
    cpu_offload_gb: float = 0.0
