"""Captures what a test runs into a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a graph of `run`, which has run once before, as an engine's warm-up does."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
