"""What a rank on a GPU does where one on a CPU does something else; called by the worker.

Imported only where the model is on a GPU: it brings the Triton ops along.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from vllm._custom_ops.triton.table import register_triton_ops
from vllm.attention.backends.table import load_backend
from vllm.config import EngineConfig
from vllm.distributed.parallel_state import TensorParallel
from vllm.logger import init_logger, warn_once
from vllm.model_executor.models.interfaces import TextModel
from vllm.platforms.interface import Platform
from vllm.worker.cache_engine import CacheEngine
from vllm.worker.gpu_memory import measure_memory
from vllm.worker.gpu_model_runner import GpuModelRunner, RunnerLimits
from vllm.worker.layer_setup import LayerSetup, list_groups
from vllm.worker.memory import GIB, choose_gpu_cache_bytes

logger = init_logger(__name__)


def set_up_device(index: int) -> torch.device:
    """Make a GPU this process's own and register the ops that run on it."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    register_triton_ops()
    from vllm._custom_ops.triton.cache_folder import provide_cache_folder  # noqa: PLC0415

    provide_cache_folder()
    return device


def share_cache_folder(folder: Path) -> None:
    """Let all ranks of an engine compile into one folder where Triton's cannot be written.

    Called in the process of a rank, before its worker is made, which says it if Triton is missing.
    """
    with suppress(ImportError):
        from vllm._custom_ops.triton.cache_folder import provide_cache_folder  # noqa: PLC0415

        provide_cache_folder(folder)


def read_limits(config: EngineConfig, layers: LayerSetup) -> RunnerLimits:
    """Return what a step may hold.

    Steps are padded where every layer's kernel knows padding, and captured where none waits for the
    device; --enforce-eager captures nothing, but pads alike.
    """
    scheduler = config.scheduler_config
    kernels = sorted(set(layers.kernel_names.values()))
    waiting = [name for name in kernels if not load_backend(name).is_capturable]
    if waiting and not config.model_config.enforce_eager:
        warn_once(
            logger,
            f"attention kernel {', '.join(waiting)} waits for the device, so that decode steps run "
            "without CUDA graphs, many times slower; name another kernel, or let the engine choose",
        )
    return RunnerLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=scheduler.max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        has_graphs=not (config.model_config.enforce_eager or waiting),
        pads_decodes=not waiting,
        pads_prompts=set(kernels) <= {"triton"},  # others want each prompt's length on the host
    )


def choose_cache_bytes(
    model: TextModel,
    layers: LayerSetup,
    config: EngineConfig,
    tp: TensorParallel,
    platform: Platform,
    device: torch.device,
) -> int:
    """Return the bytes of this rank's cache, from what the largest step really takes.

    Raises:
        OutOfMemoryError: nothing is left, or less than was asked for.
    """
    profile = measure_memory(
        model,
        layers.specs,
        list_groups(layers.specs, config),
        layers.kernel_names,
        tp,
        limits=read_limits(config, layers),
        device=device,
    )
    logger.info(
        "Memory: weights %.2f GiB, largest step %.2f GiB, graphs %.2f GiB, outside torch %.2f GiB",
        profile.weight_bytes / GIB,
        profile.step_bytes / GIB,
        profile.graph_bytes / GIB,
        profile.foreign_bytes / GIB,
    )
    memory = platform.get_memory(tp.rank)
    cache_bytes, warning = choose_gpu_cache_bytes(
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes - profile.step_bytes - profile.graph_bytes,
        own_peak_bytes=profile.peak_bytes,
        utilization=config.cache_config.gpu_memory_utilization,
        wanted_bytes=config.cache_config.cache_bytes,
    )
    if warning:
        logger.warning("%s", warning)
    return cache_bytes


def make_runner(
    model: TextModel,
    cache: CacheEngine,
    layers: LayerSetup,
    config: EngineConfig,
    tp: TensorParallel,
    device: torch.device,
) -> GpuModelRunner:
    """Return a runner that is ready for steps, its graphs captured."""
    runner = GpuModelRunner(
        model,
        cache,
        layers.kernel_names,
        tp,
        limits=read_limits(config, layers),
        device=device,
        cuts=layers.cuts,
    )
    runner.capture()
    return runner
