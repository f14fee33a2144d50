"""The Triton kernels of a model, compiled before its first step.

Called by the worker of a rank on a GPU, once its weights are loaded. Compiled one after the other,
as they are first launched, they would take the better part of a start, and some would stop a server
in the middle of its requests.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING

import torch

from vllm._custom_ops.triton.launch import knows_triton
from vllm.attention.backends.abstract import KernelQuery
from vllm.attention.backends.table import KERNELS, rank_kernels
from vllm.attention.probe import run_probe
from vllm.attention.selector import read_env_kernel
from vllm.config import EngineConfig
from vllm.distributed.parallel_state import TensorParallel
from vllm.logger import init_logger
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.interfaces import TextModel
from vllm.platforms.interface import Platform
from vllm.worker.cache_engine import CacheEngine
from vllm.worker.gpu_memory import explain_out_of_memory, lay_out_least
from vllm.worker.gpu_model_runner import GpuModelRunner
from vllm.worker.gpu_setup import read_limits
from vllm.worker.gpu_warmup import choose_layers, run_all_steps
from vllm.worker.layer_setup import list_groups, set_up_layers

if TYPE_CHECKING:
    from vllm._custom_ops.triton.compiler import KernelCompiler

logger = init_logger(__name__)

_OURS = "triton"


def make_compiler() -> AbstractContextManager[KernelCompiler | None]:
    """Return what compiles side by side, or None with a Triton whose launches are not known."""
    if not knows_triton():
        return nullcontext()
    from vllm._custom_ops.triton.compiler import KernelCompiler  # noqa: PLC0415

    return KernelCompiler(starts_early=not expects_others())


def expects_others() -> bool:
    """Return whether attention kernels of others may serve, so that nothing is compiled ahead.

    Known before the model is: the environment names one, or a package is there that is preferred.
    """
    named = read_env_kernel("cuda")
    if named is not None:
        return named != _OURS
    preferred = takewhile(lambda name: name != _OURS, rank_kernels("cuda"))
    packages = (KERNELS[name].package for name in preferred)
    return any(package and find_spec(package[0]) for package in packages)


def compile_ahead(
    model: TextModel,
    config: EngineConfig,
    tp: TensorParallel,
    platform: Platform,
    device: torch.device,
    compiler: KernelCompiler | None,
) -> None:
    """Compile what steps of all kinds will launch and is not in Triton's cache, side by side.

    Steps of a few layers, and the probes of attention kernels that are still to come, are run with
    their launches left out. Kernels of others would read what was left out, so that models which
    use one are compiled as their steps come.

    Args:
        model: loaded; its layers are bound to the kernels that will serve them if no probe fails.
        config: of the engine.
        tp: the ranks; the first one compiles for all.
        platform: that of the device.
        device: where steps run.
        compiler: None on the other ranks.

    Raises:
        OutOfMemoryError: the largest step does not fit.
    """
    probes: list[tuple[str, KernelQuery]] = []

    def postpone(name: str, query: KernelQuery) -> None:
        probes.append((name, query))

    layers = set_up_layers(model, config, platform, postpone)
    others = set(layers.kernel_names.values()) - {_OURS}
    if others or not knows_triton():
        why = f"attention kernel {', '.join(sorted(others))}" if others else "this Triton"
        logger.info("With %s kernels are compiled when they are first launched", why)
        return
    from vllm._custom_ops.triton.ahead import note_kernels  # noqa: PLC0415  Triton's inner parts

    started_s = time.perf_counter()
    limits = read_limits(config, layers)
    cache = CacheEngine(layers.specs, lay_out_least(list_groups(layers.specs, config)), device)
    part = model
    if isinstance(model, CausalLM):
        part = model.take_layers(choose_layers(model, cache.caches))
    runner = GpuModelRunner(part, cache, layers.kernel_names, tp, limits=limits, device=device)
    with explain_out_of_memory(limits, device), note_kernels() as notes:
        for name, query in probes:
            run_probe(name, query)
        run_all_steps(model, runner, cache.geometries, limits, device)
    logger.info(
        "%d kernels are to be compiled, which took %.2f s to find out",
        len(notes),
        time.perf_counter() - started_s,
    )
    if compiler is not None:
        compiler.compile(notes)
    tp.barrier()
