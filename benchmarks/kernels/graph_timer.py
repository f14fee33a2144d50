"""Times launches inside of a CUDA graph, where the host costs nothing, and the copy bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

COLD_BYTES = 400 << 20
"""Calls that follow each other read at least so much before they read the same again: no cache
holds it."""

NUM_CALLS = 20
NUM_REPLAYS = 5


def count_copies(num_bytes: int) -> int:
    """Return how many copies of a weight make every call a cold one."""
    return max(2, min(NUM_CALLS, -(-COLD_BYTES // num_bytes)))


def measure_us(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median time of a call, out of graphs of NUM_CALLS that take turns."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(NUM_CALLS):
            calls[call % len(calls)]()
    graph.replay()
    times_us = []
    for _ in range(NUM_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_us.append(start.elapsed_time(end) * 1e3 / NUM_CALLS)
    return statistics.median(times_us)


def measure_copy_bytes_per_s() -> float:
    """Return bytes read and written by a large copy, each second.

    A kernel copies: the copy engine, which a plain `copy_` in a graph may take, is slower.
    """
    source = torch.randint(0, 1 << 30, (1 << 27,), dtype=torch.int64, device="cuda")
    target = torch.empty_like(source)
    time_us = measure_us([lambda: torch.bitwise_not(source, out=target)])
    return 2 * source.numel() * source.element_size() / (time_us * 1e-6)
