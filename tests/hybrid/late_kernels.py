"""Which Triton kernels random steps want that were not compiled ahead, on a machine without a GPU.

Run by `test_late_kernels.py` in a process of its own, where kernels are not interpreted and tensors
say that they are on a GPU. Launches are only noted; ops in C++ do nothing. Told an architecture,
how many sequences there are at most, and families; prints JSON, for each family the kernels that
came late.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime.driver import driver

import vllm._custom_ops
from tests._custom_ops.triton.compile_for import play_gpu
from tests._custom_ops.triton.stand_in import Driver
from tests.e2e.gpu.families import write_checkpoint
from vllm import EngineArgs
from vllm._custom_ops.triton import ahead, table
from vllm.attention import probe
from vllm.attention.backends.abstract import KernelQuery
from vllm.config import EngineConfig
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers import state
from vllm.model_executor.model_loader.loader import get_model_architecture
from vllm.platforms.cuda import CudaPlatform
from vllm.worker import gpu_input_batch, gpu_kernels, gpu_warmup
from vllm.worker.cache_engine import CacheEngine
from vllm.worker.cuda_graph import list_graph_sizes
from vllm.worker.gpu_memory import lay_out_least
from vllm.worker.gpu_model_runner import GpuModelRunner, RunnerLimits
from vllm.worker.layer_setup import list_groups

CPU = torch.device("cpu")
MODEL_LEN, NUM_TOKENS = 2048, 1024


class Ops:
    """The ops: Triton's, and nothing for the others."""

    def __init__(self) -> None:
        modules = [importlib.import_module(f"{table.__package__}.{m}") for m in table.MODULES]
        self._functions = {op: f for module in modules for op, f in module.OPS.items()}

    def __getattr__(self, op: str) -> Any:
        return self._functions.get(op, lambda *args: None)


@contextmanager
def act_as_gpu() -> Iterator[None]:
    """Let layers take the way of a GPU inside; weights are to be made before."""
    driver.set_active(Driver())
    state.has_step_ops = lambda tensor: True
    gpu_input_batch.StagingRing = lambda *args: None  # pinned memory wants a GPU
    gpu_kernels.run_probe = run_probe_here
    torch.cuda.is_available = lambda: True
    doors = [m.name for m in pkgutil.iter_modules(vllm._custom_ops.__path__) if not m.ispkg]
    for name in doors:
        module = importlib.import_module(f"vllm._custom_ops.{name}")
        for namespace in ("C", "CACHE_OPS"):
            if name != "library" and hasattr(module, namespace):
                setattr(module, namespace, Ops())
    torch.Tensor.is_cuda = property(lambda self: True)
    try:
        yield
    finally:
        del torch.Tensor.is_cuda


class Recorder:
    """Takes the place of the compiler."""

    def __init__(self) -> None:
        self.known: list[ahead.KernelNote] = []

    def compile(self, notes: list[ahead.KernelNote]) -> None:
        """Keep what would be compiled."""
        self.known += notes


class GpuPlatform(CudaPlatform):
    """An H200, for the choice of kernels."""

    def get_device_capability(self, index: int = 0) -> tuple[int, int]:
        """See Platform."""
        return (9, 0)


def run_probe_here(name: str, query: KernelQuery) -> None:
    """Take the place of the probe, whose tensors would be on a GPU."""
    probe.run_probe(name, replace(query, device="cpu"))


def make_limits(num_seqs: int) -> RunnerLimits:
    """Return what a step may hold."""
    return RunnerLimits(
        max_num_seqs=num_seqs,
        max_model_len=MODEL_LEN,
        max_num_batched_tokens=NUM_TOKENS,
        has_graphs=True,
    )


def make_runner(
    model: Any, config: EngineConfig, num_seqs: int
) -> tuple[GpuModelRunner, CacheEngine]:
    """Return a runner on a cache of another size than that of the runner before."""
    specs = model.cache_specs()
    layout = replace(lay_out_least(list_groups(specs, config)), num_superblocks=16)
    cache = CacheEngine(specs, layout, CPU)
    kernels = dict.fromkeys(model.attention_layers(), "triton")
    tp, limits = TensorParallel.single(), make_limits(num_seqs)
    return GpuModelRunner(model, cache, kernels, tp, limits=limits, device=CPU), cache


def find_late(directory: Path, num_seqs: int) -> list[str]:
    """Return the kernels that random steps want and `compile_ahead` does not know."""
    config = EngineArgs(
        model=str(directory), device="cpu", dtype="bfloat16", skip_tokenizer_init=True,
        max_model_len=MODEL_LEN, max_num_seqs=num_seqs, max_num_batched_tokens=NUM_TOKENS,
    ).create_engine_config()  # fmt: skip
    cls, _ = get_model_architecture(config.model_config)
    model: Any = cls(
        config.model_config.hf_config,
        dtype=torch.bfloat16,
        tp=TensorParallel.single(),
        max_model_len=MODEL_LEN,
    ).eval()
    compiler = Recorder()
    with act_as_gpu(), torch.inference_mode():
        gpu_kernels.compile_ahead(
            model, config, TensorParallel.single(), GpuPlatform(), CPU, compiler
        )
        runner, cache = make_runner(model, config, num_seqs)
        with ahead.note_kernels() as wanted:
            for num_rows in list_graph_sizes(num_seqs):
                model.compute_logits(runner.run_decode(num_rows))
            for size in runner.prompt_sizes:
                runner.run_prompts(size)
            for new_lens, computed_lens in draw_steps(num_seqs):
                step = gpu_warmup.make_step(new_lens, computed_lens, cache.geometries, device=CPU)
                runner.run_forward(step)
            for layer in model.attention_layers().values():
                run_probe_here("triton", replace(layer.query, block_tokens=16))
    return sorted(note.name for note in set(wanted) - set(compiler.known))


def draw_steps(num_seqs: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield new and computed tokens of steps of every kind."""
    rng = random.Random(0)
    for _ in range(40):
        num_others = rng.randrange(1, min(num_seqs, 3) + 1)
        num_single = rng.choice((0, rng.randrange(num_seqs - num_others + 1)))
        new_lens = [1] * num_single + [rng.randrange(2, 300) for _ in range(num_others)]
        computed = [rng.choice((0, 64, 77, 900)) for _ in range(num_others)]
        yield new_lens, [rng.randrange(1, 900) for _ in range(num_single)] + computed


if __name__ == "__main__":
    play_gpu(int(sys.argv[1]))
    most = int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: find_late(write_checkpoint(name, Path(folder)), most) for name in sys.argv[3:]
        }
    print(json.dumps(found))
