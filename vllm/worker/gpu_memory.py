"""How much memory a model's largest step takes on a GPU, found by running it.

Called by the worker between loading and the layout of the cache. Runs a prefill of the token
budget, the logits and the draw of all rows, and captures the largest graphs, all on a cache of two
superblocks that is freed again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.attention.layer import Attention
from vllm.batch import ForwardBatch
from vllm.cache_spec import CacheLayout, GroupLayout, KVCacheGroup, LayerCacheSpec
from vllm.distributed.parallel_state import TensorParallel
from vllm.errors import OutOfMemoryError
from vllm.model_executor.layers.sampler import Sampler, SampleRequest
from vllm.model_executor.layers.sampling_state import SamplingState
from vllm.model_executor.models.interfaces import TextModel
from vllm.step import NewRow, RowSampling
from vllm.utils.math import cdiv
from vllm.worker.block_table import GroupGeometry
from vllm.worker.cache_engine import CacheEngine
from vllm.worker.gpu_model_runner import GpuModelRunner, RunnerLimits
from vllm.worker.gpu_warmup import make_step
from vllm.worker.memory import GIB

_GRAPH_BYTES = 8 << 20
"""What the driver keeps for one more graph beside the memory that it shares with the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Bytes on one GPU.

    Attributes:
        weight_bytes: held by tensors before the largest step.
        step_bytes: that the largest step takes on top.
        graph_bytes: that the graphs will take.
        foreign_bytes: of other processes and of libraries, outside torch's allocator.
    """

    weight_bytes: int
    step_bytes: int
    graph_bytes: int
    foreign_bytes: int

    @property
    def peak_bytes(self) -> int:
        """What this instance needs beside its cache."""
        return self.weight_bytes + self.step_bytes + self.graph_bytes


def measure_memory(
    model: TextModel,
    specs: Sequence[LayerCacheSpec],
    groups: Sequence[KVCacheGroup],
    kernels: Mapping[int, str],
    tp: TensorParallel,
    *,
    limits: RunnerLimits,
    device: torch.device,
) -> MemoryProfile:
    """Run the largest step and the largest graph and say what they took.

    Args:
        model: loaded, with its kernels bound.
        specs: what its layers keep.
        groups: the cache groups.
        kernels: kernel of each attention layer.
        tp: the ranks.
        limits: what a step may hold.
        device: where it runs.

    Raises:
        OutOfMemoryError: the step does not fit beside the weights.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    weight_bytes = torch.cuda.memory_allocated()
    cache = CacheEngine(specs, lay_out_least(groups), device)
    runner = GpuModelRunner(model, cache, kernels, tp, limits=limits, device=device)
    with explain_out_of_memory(limits, device):
        _run_largest_step(model, runner, cache.geometries, limits, device)
        step_bytes = torch.cuda.max_memory_allocated() - weight_bytes
        step_bytes += count_scratch_bytes(model.attention_layers().values(), limits)
        torch.cuda.empty_cache()
        graph_bytes = _measure_graphs(runner, limits)
    del runner, cache
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return MemoryProfile(
        weight_bytes=weight_bytes,
        step_bytes=step_bytes,
        graph_bytes=graph_bytes,
        foreign_bytes=total - free - torch.cuda.memory_reserved(),
    )


@contextmanager
def explain_out_of_memory(limits: RunnerLimits, device: torch.device) -> Iterator[None]:
    """Say of a step inside that does not fit what to do about it.

    Raises:
        OutOfMemoryError: in the place of torch's.
    """
    weight_bytes = torch.cuda.memory_allocated()
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"a step of {limits.max_num_batched_tokens} tokens or {limits.max_num_seqs} sequences "
            f"does not fit on {device} beside {weight_bytes / GIB:.2f} GiB of weights ({error}); "
            "lower --max-num-batched-tokens or --max-num-seqs, or free memory on the card"
        ) from error


def count_scratch_bytes(layers: Iterable[Attention], limits: RunnerLimits) -> int:
    """Return what one layer lays beside the cache for prompts that go on.

    The step that is measured has new prompts only. All prompts of a step may go on, each with two
    new tokens and as long as may be.
    """
    max_new_tokens = limits.max_num_batched_tokens
    max_keys = min(limits.max_num_seqs, cdiv(max_new_tokens, 2)) * limits.max_model_len
    return max((layer.count_scratch_bytes(max_keys, max_new_tokens) for layer in layers), default=0)


def lay_out_least(groups: Sequence[KVCacheGroup]) -> CacheLayout:
    """Return the layout of one superblock of one block, beside the pad blocks'."""
    return CacheLayout(
        groups=tuple(
            GroupLayout(
                name=group.name,
                layers=group.layers,
                block_tokens=group.block_tokens,
                blocks_per_superblock=1,
            )
            for group in groups
        ),
        num_superblocks=1,
    )


@torch.inference_mode()
def _run_largest_step(
    model: TextModel,
    runner: GpuModelRunner,
    geometries: Sequence[GroupGeometry],
    limits: RunnerLimits,
    device: torch.device,
) -> None:
    batch = _make_prefill(geometries, limits, device)
    hidden_TE = runner.run_forward(batch)
    rows = torch.arange(limits.max_num_seqs, device=device) % len(hidden_TE)
    _draw(model.compute_logits(hidden_TE[rows]))
    torch.cuda.synchronize()


def _draw(logits_LV: Tensor) -> None:
    """Sample every row by the most costly rules."""
    sampling = RowSampling(top_k=50, top_p=0.9, min_p=0.01)
    row = NewRow(
        seq_id=0,
        branch=0,
        token_ids=[0],
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=(),
        sampling=sampling,
    )
    state = SamplingState(row)
    Sampler().start(logits_LV, [SampleRequest(state, num_outputs=0)] * len(logits_LV)).wait()


def _make_prefill(
    geometries: Sequence[GroupGeometry], limits: RunnerLimits, device: torch.device
) -> ForwardBatch:
    """Return a step of the whole token budget: new prompts, as long as may be, stored nowhere."""
    longest = min(limits.max_model_len, limits.max_num_batched_tokens)
    lens = [longest] * (limits.max_num_batched_tokens // longest)
    rest = limits.max_num_batched_tokens % longest
    if rest > 1:  # a row of one token would be a decode row, which come first
        lens.append(rest)
    return make_step(lens, [0] * len(lens), geometries, device=device)


def _measure_graphs(runner: GpuModelRunner, limits: RunnerLimits) -> int:
    """Capture the largest graph of each kind, see what they hold; they go with the runner."""
    if not limits.has_graphs:
        return 0
    before = torch.cuda.memory_reserved()
    runner.capture(only_largest=True)
    torch.cuda.synchronize()
    return max(0, torch.cuda.memory_reserved() - before) + _GRAPH_BYTES * runner.num_graphs
