"""The same steps padded and not, by a GPU's runner on a machine without one.

Run by `test_padded_steps.py` in a process of its own, where tensors say that they are on a GPU.
Triton's kernels are interpreted, other ops are those of the CPU or naive twins, new memory is NaN.
Prints JSON: how far hidden states of each family named on the command line are apart.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vllm._custom_ops
from tests._custom_ops.triton import conftest as _mended  # noqa: F401  interprets kernels
from tests.e2e.gpu.families import write_checkpoint
from tests.worker.test_gpu_input_batch import HostRing
from vllm import EngineArgs
from vllm._custom_ops import library, moe, naive
from vllm._custom_ops.triton import table
from vllm.cache_spec import CacheLayout, GroupLayout
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers import state
from vllm.model_executor.model_loader.loader import get_model_architecture
from vllm.step import NewRow, PlanRow, RowSampling, StepPlan
from vllm.worker import gpu_input_batch
from vllm.worker.cache_engine import CacheEngine
from vllm.worker.gpu_model_runner import GpuModelRunner, RunnerLimits
from vllm.worker.layer_setup import list_groups

CPU = torch.device("cpu")
MAX_LEN = 256
STEPS = (
    ({0: 13}, {0: 13}),
    ({1: 30, 2: 11}, {0: 1, 1: 20, 2: 11}),
    ({3: 1, 4: 5}, {0: 1, 2: 1, 3: 1, 1: 10, 4: 5}),
)
"""Lengths of new prompts, and new tokens of the rows of a step."""


class Ops:
    """The ops of a namespace: Triton's, else the CPU's, else naive twins."""

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace
        self._functions: dict[str, Callable[..., None]] = {}
        for found in pkgutil.iter_modules(naive.__path__):
            self._functions |= vars(importlib.import_module(f"{naive.__name__}.{found.name}"))
        modules = [importlib.import_module(f"{table.__package__}.{m}") for m in table.MODULES]
        self._triton = {op: f for module in modules for op, f in module.OPS.items()}

    def __getattr__(self, op: str) -> Any:
        if op in self._triton:
            return self._triton[op]
        try:
            return getattr(self._namespace, op)
        except AttributeError:  # an op of GPUs alone
            return self._functions[op]


@contextmanager
def act_as_gpu() -> Iterator[None]:
    """Let layers take the way of a GPU inside; weights are to be made before."""
    namespaces = {"C": Ops(library.C), "CACHE_OPS": Ops(library.CACHE_OPS)}
    state.has_step_ops = lambda tensor: True
    gpu_input_batch.StagingRing = HostRing
    for found in pkgutil.iter_modules(vllm._custom_ops.__path__):
        if found.ispkg or found.name == "library":
            continue
        door = importlib.import_module(f"vllm._custom_ops.{found.name}")
        for name, ops in namespaces.items():
            if hasattr(door, name):
                setattr(door, name, ops)
    moe.choose_experts = importlib.import_module(f"{naive.__name__}.moe").choose_experts
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        del torch.Tensor.is_cuda


class Sequences:
    """Plans of the steps, blocks and all."""

    def __init__(self, cache: CacheEngine) -> None:
        self._geometries = cache.geometries
        self._rng = random.Random(5)
        self._tokens: dict[int, list[int]] = {}
        self._computed: dict[int, int] = {}
        self._tables: dict[int, list[list[int]]] = {}
        self._num_blocks = 0

    def plan(self, step: int, prompts: dict[int, int], rows: dict[int, int]) -> StepPlan:
        """Return the plan of a step."""
        plan_rows, new_rows = [], []
        for seq_id, count in rows.items():
            if seq_id in prompts:
                length = prompts[seq_id]
                self._tokens[seq_id] = [self._rng.randrange(3, 200) for _ in range(length)]
                self._computed[seq_id] = 0
                self._tables[seq_id] = [[] for _ in self._geometries]
            computed, tokens = self._computed[seq_id], self._tokens[seq_id]
            added = self._add_blocks(self._tables[seq_id], computed + count)
            if seq_id in prompts:
                new_rows.append(
                    NewRow(
                        seq_id=seq_id,
                        branch=0,
                        token_ids=list(tokens),
                        num_prompt_tokens=len(tokens),
                        num_computed_tokens=0,
                        block_ids=added,
                        sampling=RowSampling(),
                    )
                )
                added = tuple([] for _ in added)
            self._computed[seq_id] += count
            plan_rows.append(
                PlanRow(
                    seq_id=seq_id,
                    num_computed_tokens=computed,
                    num_new_tokens=count,
                    new_block_ids=added,
                    num_samples=int(computed + count == len(tokens)),
                )
            )
        return StepPlan(step=step, new_rows=new_rows, rows=plan_rows)

    def draw(self, seq_ids: list[int]) -> Tensor:
        """Return a token for each sequence, which goes on with it."""
        drawn = [self._rng.randrange(3, 200) for _ in seq_ids]
        for seq_id, token in zip(seq_ids, drawn, strict=True):
            self._tokens[seq_id].append(token)
        return torch.tensor(drawn)

    def _add_blocks(self, tables: list[list[int]], num_tokens: int) -> tuple[list[int], ...]:
        added = []
        for block_table, geometry in zip(tables, self._geometries, strict=True):
            wanted = 1 if geometry.is_per_sequence else -(-num_tokens // geometry.block_tokens)
            count = wanted - len(block_table)
            ids = list(range(self._num_blocks, self._num_blocks + count))
            self._num_blocks += count
            block_table.extend(ids)
            added.append(ids)
        return tuple(added)


def make_model(name: str) -> tuple[Any, Any]:
    """Return a model with random weights and its config."""
    with tempfile.TemporaryDirectory() as folder:
        config = EngineArgs(
            model=str(write_checkpoint(name, Path(folder))), device="cpu", dtype="float32",
            skip_tokenizer_init=True, max_model_len=MAX_LEN,
        ).create_engine_config()  # fmt: skip
    cls, _ = get_model_architecture(config.model_config)
    model: Any = cls(
        config.model_config.hf_config,
        dtype=torch.float32,
        tp=TensorParallel.single(),
        max_model_len=MAX_LEN,
    ).eval()
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.08) if parameter.dim() > 1 else parameter.data.fill_(0.9)
    for layer in model.attention_layers().values():
        layer.bind("triton")
    return model, config


@torch.inference_mode()
def run_steps(model: Any, config: Any, *, is_padded: bool) -> list[Tensor]:
    """Return the hidden states of the sampled rows of each step."""
    specs = model.cache_specs()
    groups = [
        GroupLayout(
            name=group.name,
            layers=group.layers,
            block_tokens=group.block_tokens,
            blocks_per_superblock=1,
        )
        for group in list_groups(specs, config)
    ]
    cache = CacheEngine(specs, CacheLayout(groups=tuple(groups), num_superblocks=80), CPU)
    cache.arena.fill_(255)
    limits = RunnerLimits(
        max_num_seqs=8, max_model_len=MAX_LEN, max_num_batched_tokens=64, has_graphs=False,
        pads_decodes=is_padded, pads_prompts=is_padded,
    )  # fmt: skip
    kernels = dict.fromkeys(model.attention_layers(), "triton")
    tp = TensorParallel.single()
    runner = GpuModelRunner(model, cache, kernels, tp, limits=limits, device=CPU)
    batch, sequences, hidden = runner._input_batch, Sequences(cache), []
    for number, (prompts, rows) in enumerate(STEPS):
        step = batch.apply(sequences.plan(number, prompts, rows))
        assert step is not None
        assert (batch.prompt_size is not None) == is_padded
        hidden.append(runner._run_step(step)[: len(step.sampled)].clone())
        assert hidden[-1].isfinite().all()
        sampled = [step.rows[i] for i in step.sampled]
        batch.advance(sampled, sequences.draw([row.seq_id for row in sampled]))
    return hidden


def find_gap(name: str) -> float:
    """Return the largest difference of hidden states."""
    model, config = make_model(name)
    with act_as_gpu():
        padded, plain = (run_steps(model, config, is_padded=b) for b in (True, False))
    return max(float((a - b).abs().max()) for a, b in zip(padded, plain, strict=True))


if __name__ == "__main__":
    library.load_extension()
    print(json.dumps({name: find_gap(name) for name in sys.argv[1:]}))
