"""Which decode graphs are captured, in which order. Nothing is captured here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm.worker import cuda_graph
from vllm.worker.cuda_graph import DecodeGraphs


class Graph:
    """A graph that does nothing."""

    def replay(self) -> None:
        pass


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the steps that were captured."""
    rows = []

    def capture(run: Callable[[], Tensor], pool: Any) -> tuple[Graph, Tensor]:
        result = run()
        rows.append(len(result))
        assert pool == "pool"
        return Graph(), result

    monkeypatch.setattr(cuda_graph, "capture_step", capture)
    return rows


def test_the_largest_comes_first(captured: list[int]) -> None:
    graphs = DecodeGraphs(torch.zeros, (1, 2, 8))
    graphs.capture("pool")
    assert captured == [8, 2, 1]
    assert 2 in graphs
    assert 3 not in graphs
    assert len(graphs.replay(2)) == 2


def test_the_largest_alone(captured: list[int]) -> None:
    graphs = DecodeGraphs(torch.zeros, (1, 2, 8))
    graphs.capture("pool", only_largest=True)
    assert captured == [8]
    assert 2 not in graphs
