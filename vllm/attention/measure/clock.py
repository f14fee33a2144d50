"""Time of a piece of work on a device, and what the device can do at most.

On a GPU time is taken between two events of its stream, on a CPU by the host's clock.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm.types import DType
from vllm.utils.tensors import to_torch_dtype

_COPY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
_MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
_NUM_RUNS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """What plain torch reaches here.

    Attributes:
        copy_bytes_per_s: bytes read plus bytes written by a large copy.
        matmul_flops_per_s: operations of a large matrix product in the given element type.
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: float


def time_run(run: Callable[[], None], device: str) -> float:
    """Return the seconds that `run` takes, its work on the device done."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def capture_run(run: Callable[[], None]) -> Callable[[], None] | None:
    """Return the replay of a CUDA graph of `run`, or None if it cannot be captured.

    All that `run` needs is compiled already. Whether it waits is found out before the capture,
    since one that fails may be felt by those after it.
    """
    if _waits_for_device(run):
        return None
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # libraries get their workspaces on the stream of the capture
    torch.cuda.current_stream().wait_stream(stream)
    try:
        with torch.cuda.graph(graph, stream=stream):
            run()
    except RuntimeError:
        torch.cuda.synchronize()  # raises where the device is lost
        return None
    replay: Callable[[], None] = graph.replay
    return replay


def _waits_for_device(run: Callable[[], None]) -> bool:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as cause:
        if "synchroniz" not in str(cause):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def measure_machine(device: str, dtype: DType) -> MachineRates:
    """Measure a copy and a matrix product of plain torch."""
    num_bytes, size = _COPY_BYTES[device], _MATRIX_SIZE[device]
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _find_median(lambda: target.copy_(source), device)
    left = torch.randn(size, size, device=device).to(to_torch_dtype(dtype))
    product = torch.empty_like(left)
    matmul_s = _find_median(lambda: torch.mm(left, left, out=product), device)
    return MachineRates(
        copy_bytes_per_s=2 * num_bytes / copy_s, matmul_flops_per_s=2 * size**3 / matmul_s
    )


def _find_median(run: Callable[[], object], device: str) -> float:
    def work() -> None:
        run()

    work()
    return statistics.median(time_run(work, device) for _ in range(_NUM_RUNS))
