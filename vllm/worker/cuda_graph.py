"""Steps as CUDA graphs: one for each of a few sizes, captured at the start.

Made by the GPU model runner. A graph holds everything between what the host sends and the hidden
states: block tables, all layers, the last norm. It reads lengths and tables on the device, so that
it serves every step of its size; smaller steps are padded. They are padded as well where nothing
is captured, so that a step has the same bits with a graph and without.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from vllm.logger import init_logger

logger = init_logger(__name__)

Size = TypeVar("Size")

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


class StepGraphs(Generic[Size]):
    """The graphs of one kind of step.

    Args:
        run: runs a step of a size on the current stream and returns its hidden states, [rows, E];
            every kernel of it reads and writes memory that stays where it is.
        sizes: that are captured, ascending.
        kind: name of the steps in the log.
    """

    def __init__(self, run: Callable[[Size], Tensor], sizes: Sequence[Size], kind: str) -> None:
        self._run = run
        self.sizes = tuple(sizes)
        self._kind = kind
        self._graphs: dict[Size, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(self, pool: Any, *, only_largest: bool = False) -> None:
        """Capture the sizes, the largest first: the others find their memory in its pool."""
        if not self.sizes:
            return
        started_s = time.perf_counter()
        sizes = self.sizes[:-2:-1] if only_largest else self.sizes[::-1]
        runs = [functools.partial(self._run, size) for size in sizes]
        self._graphs = dict(zip(sizes, capture_steps(runs, pool), strict=True))
        logger.info(
            "Captured %d CUDA graphs of %s in %.2f s",
            len(sizes),
            self._kind,
            time.perf_counter() - started_s,
        )

    def run(self, size: Size) -> Tensor:
        """Run a step of exactly this size, by its graph if it was captured, else kernel by kernel.

        A graph's result holds until its next replay.
        """
        if size not in self._graphs:
            return self._run(size)
        graph, hidden_BE = self._graphs[size]
        graph.replay()
        return hidden_BE


def capture_steps(
    runs: Sequence[Callable[[], Tensor]], pool: Any
) -> list[tuple[torch.cuda.CUDAGraph, Tensor]]:
    """Return the graph of each step and the tensor its result lands in.

    All steps run once before: kernels are compiled, libraries get their workspaces. Graphs share
    the memory of a pool only where they are captured on one stream.

    Args:
        runs: the steps, those that take the most memory first.
        pool: handle of the pool.
    """
    stream = _get_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    graphs = []
    for run in runs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):  # waits for the device first
            hidden_BE = run()
        graphs.append((graph, hidden_BE))
    return graphs


@functools.cache
def _get_stream() -> torch.cuda.Stream:
    """Return the stream of all captures of this process, since each has workspaces of its own."""
    return torch.cuda.Stream()
