"""One rank: its device, its model, its cache, its steps.

Executors make one in the engine's process or one in each rank's process. The order is load, report,
initialize_cache, execute. Talks to other ranks only through the TensorParallel it is given.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import cast

import torch

from vllm import envs
from vllm._custom_ops.library import load_extension
from vllm.attention.backends.abstract import KernelQuery
from vllm.attention.backends.table import load_backend
from vllm.attention.layer import Attention
from vllm.attention.selector import resolve_kernels
from vllm.cache_spec import CacheLayout, LayerCacheSpec
from vllm.config import EngineConfig
from vllm.distributed.parallel_state import TensorParallel
from vllm.errors import ConfigError
from vllm.hybrid.apply import limit_layers, name_specs
from vllm.hybrid.grouping import group_layers
from vllm.logger import init_logger
from vllm.model_executor.model_loader import load_model
from vllm.model_executor.models.interfaces import TextModel
from vllm.platforms import get_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.step import StepOutput, StepPlan
from vllm.worker.cache_engine import CacheEngine
from vllm.worker.hybrid_cache import count_hybrid_bytes
from vllm.worker.memory import GIB, choose_cpu_cache_bytes
from vllm.worker.model_runner import ModelRunner
from vllm.worker.report import LayerKernel, RankReport
from vllm.worker.threads import apply_threads

logger = init_logger(__name__)

_BLOCK_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Worker:
    """A rank of the engine.

    Args:
        tp: who the ranks are.
    """

    def __init__(self, config: EngineConfig, tp: TensorParallel) -> None:
        if config.device_config.device != "cpu":
            raise ConfigError(
                f"device {config.device_config.device!r} is not served by this version; "
                "allowed: 'cpu'"
            )
        self._config = config
        self._tp = tp
        self._device = torch.device(config.device_config.device)
        self._platform = get_platform(config.device_config.device)
        self._model: TextModel | None = None
        self._runner: ModelRunner | None = None
        self._specs: tuple[LayerCacheSpec, ...] = ()
        self._kernels: dict[int, LayerKernel] = {}
        self._block_tokens: tuple[int, ...] = ()
        if isinstance(self._platform, CpuPlatform):
            load_extension()  # a broken one is said now, not after the weights
            bind = envs.VLLM_CPU_OMP_THREADS_BIND
            apply_threads(bind, tp.rank, tp.size, self._platform.list_cpus())

    def load(self) -> RankReport:
        """Load the model, choose its kernels and say what this rank has and needs.

        Raises:
            WeightError, ConfigError, OutOfMemoryError, KernelError: the model cannot be served
                here.
        """
        started_s = time.perf_counter()
        config = self._config
        module = load_model(
            config.model_config,
            config.load_config,
            self._device,
            self._tp,
            cache_dtype=config.cache_config.cache_dtype,
        )
        model = self._model = cast(TextModel, module)
        layers: dict[int, Attention] = dict(model.attention_layers())
        limit_layers(layers, config.hybrid.policies)
        self._specs = name_specs(model.cache_specs(), config.hybrid.policies)
        queries = {layer: self._complete(layer, attn.query) for layer, attn in layers.items()}
        choices = resolve_kernels(
            queries,
            {i: attn.layer_impl for i, attn in layers.items()},
            strict=config.hybrid.is_strict,
        )
        for layer, choice in choices.items():
            layers[layer].bind(choice.kernel)
            self._kernels[layer] = LayerKernel(layer=layer, kernel=choice.kernel, note=choice.note)
        self._block_tokens = self._list_block_tokens(queries)
        self._tp.barrier()  # free memory means something only when every rank has loaded
        weights = {*module.parameters(), *module.buffers()}  # a tied one counts once
        return RankReport(
            rank=self._tp.rank,
            cache_specs=self._specs,
            cache_bytes=self._choose_cache_bytes(),
            kernels=tuple(self._kernels.values()),
            block_tokens=self._block_tokens,
            weight_bytes=sum(t.numel() * t.element_size() for t in weights),
            load_seconds=time.perf_counter() - started_s,
        )

    def initialize_cache(self, layout: CacheLayout) -> None:
        """Allocate the arena of `layout` and make ready for steps."""
        assert self._model is not None, "the model must be loaded before its cache"
        scheduler = self._config.scheduler_config
        cache = CacheEngine(
            self._specs,
            layout,
            self._device,
            kernel_block_tokens=self._block_tokens,
            uncached_types=self._config.hybrid.uncached_types,
        )
        self._runner = ModelRunner(
            self._model,
            cache,
            {layer: kernel.kernel for layer, kernel in self._kernels.items()},
            self._tp,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=scheduler.max_model_len,
            device=self._device,
        )
        logger.debug("rank %d: KV cache of %.2f GiB", self._tp.rank, cache.arena.numel() / GIB)

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step."""
        assert self._runner is not None, "the cache must be laid out before the first step"
        return self._runner.execute(plan)

    def close(self) -> None:
        """Let go of the model, the cache and the other ranks; safe to call twice."""
        self._runner = None
        self._model = None
        self._tp.close()

    def _complete(self, layer: int, query: KernelQuery) -> KernelQuery:
        policies = self._config.hybrid.policies
        own_size = policies[layer].block_tokens if policies else None
        return replace(
            query,
            block_tokens=own_size or self._config.cache_config.block_size,
            device=self._device.type,
            capability=self._platform.get_device_capability(),
        )

    def _list_block_tokens(self, queries: dict[int, KernelQuery]) -> tuple[int, ...]:
        """Return the block sizes that the chosen kernel of every layer takes."""
        pairs = {(self._kernels[layer].kernel, query) for layer, query in queries.items()}
        own_sizes = self._config.hybrid.block_sizes
        sizes = sorted({*_BLOCK_TOKENS, self._config.cache_config.block_size, *own_sizes})
        return tuple(
            size
            for size in sizes
            if all(
                load_backend(kernel).supports(replace(query, block_tokens=size)) is None
                for kernel, query in pairs
            )
        )

    def _choose_cache_bytes(self) -> int:
        cache, scheduler = self._config.cache_config, self._config.scheduler_config
        useful_bytes = count_hybrid_bytes(
            group_layers(self._specs, self._config.hybrid, cache.block_size),
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=scheduler.max_model_len,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
        )
        wanted_bytes = cache.cache_bytes or int(envs.VLLM_CPU_KVCACHE_SPACE * GIB)
        return choose_cpu_cache_bytes(
            wanted_bytes=wanted_bytes,
            free_bytes=self._platform.get_memory().free_bytes,
            useful_bytes=useful_bytes,
            num_ranks=self._tp.size,
        )
