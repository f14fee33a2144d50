"""Decode steps as CUDA graphs: one for each of a few batch sizes, captured at the start.

Made by the GPU model runner. A graph holds everything between the columns that the host sends and
the hidden states: block tables, all layers, the last norm. It reads lengths and tables on the
device, so that it serves every batch of its size; smaller batches are padded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm.logger import init_logger

logger = init_logger(__name__)

_SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32)


def list_graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes that get a graph, ascending; the last is `max_num_seqs`.

    Steps between neighbours are at most a third of the batch, so that padding stays cheap.
    """
    sizes = [size for size in _SMALL_SIZES if size < max_num_seqs]
    size = _SMALL_SIZES[-1]
    while size < max_num_seqs:
        size += 16 if size < 128 else 32
        sizes.append(min(size, max_num_seqs))
    return tuple(dict.fromkeys((*sizes, max_num_seqs))) if sizes else (max_num_seqs,)


class DecodeGraphs:
    """The graphs of one model.

    Args:
        run: runs a decode step of so many rows on the current stream and returns its hidden states,
            [rows, E]; every kernel of it reads and writes memory that stays where it is.
        sizes: batch sizes, ascending.
    """

    def __init__(self, run: Callable[[int], Tensor], sizes: Sequence[int]) -> None:
        self._run = run
        self.sizes = tuple(sizes)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(self, pool: Any, *, only_largest: bool = False) -> None:
        """Capture the sizes, the largest first: the others find their memory in its pool."""
        started_s = time.perf_counter()
        sizes = self.sizes[-1:] if only_largest else self.sizes
        for size in reversed(sizes):
            self._graphs[size] = capture_step(partial(self._run, size), pool)
        logger.info(
            "Captured %d CUDA graphs of decode steps (up to %d rows) in %.2f s",
            len(sizes),
            sizes[-1],
            time.perf_counter() - started_s,
        )

    def replay(self, num_rows: int) -> Tensor:
        """Run the graph of exactly `num_rows` rows; its result holds until the next replay."""
        graph, hidden_BE = self._graphs[num_rows]
        graph.replay()
        return hidden_BE

    def __contains__(self, num_rows: int) -> bool:
        return num_rows in self._graphs


def capture_step(run: Callable[[], Tensor], pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return the graph of one step and the tensor its result lands in.

    The step runs once before: kernels are compiled, libraries get their workspaces.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        hidden = run()
    return graph, hidden
