"""The measurement: every kernel that serves a layer, on every load, in turns.

In turns (A, B, A, B, …), so that what disturbs the machine meets all kernels alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from vllm._custom_ops.library import load_extension
from vllm.attention.backends.abstract import KernelQuery
from vllm.attention.backends.table import KERNELS, load_backend
from vllm.attention.measure.clock import capture_run, time_run
from vllm.attention.measure.load import Load
from vllm.attention.measure.workload import Workload, count_arena_bytes, count_layers
from vllm.attention.selector import find_kernel_refusal
from vllm.platforms import get_platform

_CELL_S = 10.0
_MIN_RUNS = 3
_ARENA_SHARE = 0.6
# A layer that takes this long, and so many times another kernel's, is run once and no more.
_HOPELESS_S = 0.02
_HOPELESS_TIMES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """What one kernel took for one layer.

    Attributes:
        is_graph: whether a CUDA graph was replayed.
    """

    median_s: float
    min_s: float
    num_runs: int
    is_graph: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One load on one kind of layer.

    Attributes:
        num_layers: layers of each step; times are those of one.
        kernels: kernel -> its times.
        faults: kernel -> why it has none.
    """

    load: Load
    num_layers: int
    kernels: Mapping[str, KernelTimes] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runner:
    run: Callable[[], None]
    is_graph: bool


def prepare_device(device: str) -> None:
    """Load the ops of a device."""
    load_extension()
    if device == "cuda":
        from vllm._custom_ops.triton.table import register_triton_ops  # noqa: PLC0415  needs Triton

        register_triton_ops()


def find_refusals(query: KernelQuery) -> dict[str, str | None]:
    """Return every kernel: None if it serves `query` here, else the reason."""
    return {name: find_kernel_refusal(name, query) for name in KERNELS}


@torch.inference_mode()
def measure_cell(
    query: KernelQuery, load: Load, kernels: Sequence[str], *, stated_len: int, num_runs: int
) -> Cell:
    """Measure kernels on one load.

    Args:
        query: the kind of layer.
        load: the rows of the step.
        kernels: they serve `query`.
        stated_len: longest sequence that decode steps on a GPU are captured for.
        num_runs: runs of each kernel; fewer, but at least 3, where a cell takes long. One run of
            one layer has to do for a kernel that is far behind one before it.
    """
    if query.device == "cuda":
        torch.cuda.empty_cache()  # what the cell before has left is free
    num_layers = count_layers(query, load)
    free_bytes = get_platform(query.device).get_memory().free_bytes
    if count_arena_bytes(query, load, num_layers) > _ARENA_SHARE * free_bytes:
        return Cell(load=load, num_layers=num_layers, faults=dict.fromkeys(kernels, "no room"))
    is_captured = query.device == "cuda" and load.phase == "decode"
    work = Workload(
        query,
        load,
        num_layers=num_layers,
        stated_len=stated_len if is_captured else load.seq_len,
        rows_are_cached=query.device == "cuda",
    )
    runners: dict[str, _Runner] = {}
    faults: dict[str, str] = {}
    hopeless: dict[str, KernelTimes] = {}
    best_s = math.inf
    for name in kernels:
        try:
            layer_s = _time_layer(work, name, query.device)
            best_s = min(best_s, layer_s)
            if layer_s > max(_HOPELESS_S, _HOPELESS_TIMES * best_s):
                hopeless[name] = KernelTimes(
                    median_s=layer_s, min_s=layer_s, num_runs=1, is_graph=False
                )
            else:
                runners[name] = _make_runner(work, name, is_captured=is_captured)
        except (RuntimeError, ValueError) as cause:  # out of memory is a RuntimeError
            faults[name] = _describe_fault(cause)
    times = _run_in_turns(runners, faults, query.device, num_runs)
    measured = {
        name: KernelTimes(
            median_s=statistics.median(seconds) / num_layers,
            min_s=min(seconds) / num_layers,
            num_runs=len(seconds),
            is_graph=runners[name].is_graph,
        )
        for name, seconds in times.items()
    }
    return Cell(load=load, num_layers=num_layers, kernels=measured | hopeless, faults=faults)


def _time_layer(work: Workload, name: str, device: str) -> float:
    """Return the seconds of one layer, after a run that compiles the kernel."""
    backend = load_backend(name)
    work.run(backend, num_layers=1)
    return time_run(lambda: work.run(backend, num_layers=1), device)


def _make_runner(work: Workload, name: str, *, is_captured: bool) -> _Runner:
    """Return how to run the step with a kernel that is compiled."""
    backend = load_backend(name)

    def run() -> None:
        work.run(backend)

    replay = capture_run(run) if is_captured else None
    return _Runner(run=replay or run, is_graph=replay is not None)


def _run_in_turns(
    runners: Mapping[str, _Runner], faults: dict[str, str], device: str, num_runs: int
) -> dict[str, list[float]]:
    """Return the seconds of each run of each kernel; one that fails goes to `faults`."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    end_s = time.perf_counter() + _CELL_S
    for turn in range(num_runs):
        if turn >= _MIN_RUNS and time.perf_counter() > end_s:
            break
        for name in list(times):
            try:
                times[name].append(time_run(runners[name].run, device))
            except RuntimeError as cause:
                faults[name] = _describe_fault(cause)
                del times[name]
    return times


def _describe_fault(cause: Exception) -> str:
    return f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '')}"
