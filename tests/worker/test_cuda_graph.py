"""Which steps are captured, in which order. Nothing is captured here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from vllm.worker import cuda_graph
from vllm.worker.cuda_graph import StepGraphs


class Graph:
    """A graph that does nothing."""

    def __init__(self) -> None:
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> dict[int, Graph]:
    """The graphs that were captured, by the rows of their steps."""
    graphs: dict[int, Graph] = {}

    def capture(runs: Sequence[Callable[[], Tensor]], pool: str) -> list[tuple[Graph, Tensor]]:
        assert pool == "pool"
        results = [run() for run in runs]
        graphs.update((len(result), Graph()) for result in results)
        return [(graphs[len(result)], result) for result in results]

    monkeypatch.setattr(cuda_graph, "capture_steps", capture)
    return graphs


def test_the_largest_comes_first(captured: dict[int, Graph]) -> None:
    graphs = StepGraphs(torch.zeros, (1, 2, 8), "decode steps")
    graphs.capture("pool")
    assert list(captured) == [8, 2, 1]
    assert len(graphs.run(2)) == 2
    assert [graph.num_replays for graph in captured.values()] == [0, 1, 0]


def test_the_largest_alone(captured: dict[int, Graph]) -> None:
    graphs = StepGraphs(torch.zeros, (1, 2, 8), "decode steps")
    graphs.capture("pool", only_largest=True)
    assert list(captured) == [8]
    assert len(graphs.run(2)) == 2, "without a graph, kernel by kernel"
    assert captured[8].num_replays == 0


def test_nothing_to_capture(captured: dict[int, Graph]) -> None:
    StepGraphs(torch.zeros, (), "decode steps").capture("pool")
    assert not captured
