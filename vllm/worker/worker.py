"""One rank: its device, its model, its cache, its steps.

Executors make one in the engine's process or one in each rank's process. The order is load, report,
initialize_cache, submit. Talks to other ranks only through the TensorParallel it is given.
"""

from __future__ import annotations

import gc
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, cast

import torch

from vllm import envs
from vllm._custom_ops.library import load_extension
from vllm.cache_spec import CacheLayout
from vllm.config import EngineConfig
from vllm.distributed.parallel_state import TensorParallel
from vllm.logger import init_logger
from vllm.model_executor.model_loader import load_model
from vllm.model_executor.models.interfaces import TextModel
from vllm.platforms import get_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.step import StepPlan
from vllm.worker.cache_engine import CacheEngine
from vllm.worker.layer_setup import LayerSetup, count_full_bytes, set_up_layers
from vllm.worker.memory import GIB, choose_cpu_cache_bytes
from vllm.worker.model_runner import ModelRunner
from vllm.worker.pending_step import PendingStep, Runner
from vllm.worker.report import RankReport
from vllm.worker.threads import apply_threads

if TYPE_CHECKING:
    from vllm._custom_ops.triton.compiler import KernelCompiler

logger = init_logger(__name__)


class Worker:
    """A rank of the engine.

    Args:
        tp: who the ranks are.
    """

    def __init__(self, config: EngineConfig, tp: TensorParallel) -> None:
        self._config = config
        self._tp = tp
        self._device = torch.device(config.device_config.device)
        self._platform = get_platform(config.device_config.device)
        self._model: TextModel | None = None
        self._runner: Runner | None = None
        self._layers = LayerSetup()
        load_extension()  # a broken one is said now, not after the weights
        if self._device.type == "cuda":
            from vllm.worker import gpu_setup  # noqa: PLC0415

            self._device = gpu_setup.set_up_device(tp.rank)
        if isinstance(self._platform, CpuPlatform):
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
        with self._make_compiler() as compiler:  # which makes ready while weights are loaded
            module = load_model(
                config.model_config,
                config.load_config,
                self._device,
                self._tp,
                cache_dtype=config.cache_config.cache_dtype,
            )
            model = self._model = cast(TextModel, module)
            self._compile_ahead(model, compiler)
        layers = self._layers = set_up_layers(model, config, self._platform)
        self._tp.barrier()  # free memory means something only when every rank has loaded
        cache_bytes = self._choose_cache_bytes(model)
        weights = {*module.parameters(), *module.buffers()}  # a tied one counts once
        return RankReport(
            rank=self._tp.rank,
            cache_specs=layers.specs,
            cache_bytes=cache_bytes,
            kernels=layers.kernels,
            block_tokens=layers.block_tokens,
            weight_bytes=sum(t.numel() * t.element_size() for t in weights),
            load_seconds=time.perf_counter() - started_s,
        )

    def initialize_cache(self, layout: CacheLayout) -> None:
        """Allocate the arena of `layout` and make ready for steps."""
        assert self._model is not None, "the model must be loaded before its cache"
        cache = CacheEngine(
            self._layers.specs,
            layout,
            self._device,
            kernel_block_tokens=self._layers.block_tokens,
            uncached_types=self._config.hybrid.uncached_types,
        )
        self._runner = self._make_runner(self._model, cache)
        logger.debug("rank %d: KV cache of %.2f GiB", self._tp.rank, cache.arena.numel() / GIB)

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start one step; the one before need not have been waited for."""
        assert self._runner is not None, "the cache must be laid out before the first step"
        return self._runner.submit(plan)

    def close(self) -> None:
        """Let go of the model, the cache and the other ranks; safe to call twice."""
        self._runner = None
        self._model = None
        if self._device.type == "cuda" and self._tp.size > 1:
            gc.collect()  # NCCL is not left before the graphs that use it are gone
        self._tp.close()

    def _make_compiler(self) -> AbstractContextManager[KernelCompiler | None]:
        if self._device.type != "cuda" or self._tp.rank:  # the first compiles for all
            return nullcontext()
        from vllm.worker import gpu_kernels  # noqa: PLC0415

        return gpu_kernels.make_compiler()

    def _compile_ahead(self, model: TextModel, compiler: KernelCompiler | None) -> None:
        if self._device.type == "cuda":
            from vllm.worker import gpu_kernels  # noqa: PLC0415

            gpu_kernels.compile_ahead(
                model, self._config, self._tp, self._platform, self._device, compiler
            )

    def _make_runner(self, model: TextModel, cache: CacheEngine) -> Runner:
        if self._device.type == "cuda":
            from vllm.worker import gpu_setup  # noqa: PLC0415  brings Triton along

            return gpu_setup.make_runner(
                model, cache, self._layers, self._config, self._tp, self._device
            )
        scheduler = self._config.scheduler_config
        return ModelRunner(
            model,
            cache,
            self._layers.kernel_names,
            self._tp,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=scheduler.max_model_len,
            device=self._device,
            cuts=self._layers.cuts,
        )

    def _choose_cache_bytes(self, model: TextModel) -> int:
        if self._device.type == "cuda":
            from vllm.worker import gpu_setup  # noqa: PLC0415

            return gpu_setup.choose_cache_bytes(
                model, self._layers, self._config, self._tp, self._platform, self._device
            )
        own_bytes = self._config.cache_config.cache_bytes
        wanted_bytes = own_bytes or int(envs.VLLM_CPU_KVCACHE_SPACE * GIB)
        return choose_cpu_cache_bytes(
            wanted_bytes=wanted_bytes,
            free_bytes=self._platform.get_memory().free_bytes,
            useful_bytes=count_full_bytes(self._layers.specs, self._config),
            num_ranks=self._tp.size,
        )
