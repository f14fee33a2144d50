"""Which graph serves a step with prompts, and what the graph sees of it. Nothing is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm.batch import ForwardBatch
from vllm.worker.block_table import GroupGeometry
from vllm.worker.gpu_warmup import make_step
from vllm.worker.prompt_graph import (
    MAX_SEQ_LEN,
    PromptBuffers,
    PromptGraphs,
    PromptSize,
    list_prompt_sizes,
)

CPU = torch.device("cpu")
GEOMETRIES = (
    GroupGeometry(
        block_tokens=16, blocks_per_superblock=4, superblock_units=8, block_units=2, pad_offset=6
    ),
    GroupGeometry(
        block_tokens=1,
        blocks_per_superblock=1,
        superblock_units=8,
        block_units=8,
        pad_offset=8,
        is_per_sequence=True,
    ),
)


class Graph:
    """A graph that runs its step."""

    def __init__(self, run: Callable[[], Tensor], result: Tensor) -> None:
        self._run = run
        self._result = result

    def replay(self) -> None:
        self._result.copy_(self._run())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ForwardBatch]]:
    """The steps that graphs have run."""

    def capture(run: Callable[[], Tensor], pool: Any) -> tuple[Graph, Tensor]:
        result = run()
        return Graph(run, result), result

    monkeypatch.setattr("vllm.worker.prompt_graph.capture_step", capture)
    yield []


def make_graphs(seen: list[ForwardBatch], sizes: tuple[PromptSize, ...]) -> PromptGraphs:
    def run(batch: ForwardBatch) -> Tensor:
        seen.append(batch)
        return torch.stack((batch.input_ids, batch.positions), 1)

    graphs = PromptGraphs(run, PromptBuffers(sizes, 64, GEOMETRIES, CPU), sizes)
    graphs.capture(None)
    seen.clear()
    return graphs


def test_sizes_are_within_the_limits() -> None:
    sizes = list_prompt_sizes(48, 500)
    assert sizes == tuple(sorted(sizes))
    assert max(size.num_tokens for size in sizes) == 384
    assert {size.num_rows for size in sizes} == {8, 32, 48}
    assert all(size.num_tokens >= 2 * size.num_rows for size in sizes)
    assert list_prompt_sizes(4, 16) == ()


def test_a_step_takes_the_smallest_graph(seen: list[ForwardBatch]) -> None:
    graphs = make_graphs(seen, list_prompt_sizes(256, 256))

    def find(new_lens: list[int], computed: int = 0) -> PromptSize | None:
        step = make_step(new_lens, [computed] * len(new_lens), GEOMETRIES, device=CPU)
        return graphs.find_size(step)

    assert find([20]) == PromptSize(num_tokens=64, num_rows=8)
    assert find([64]) == PromptSize(num_tokens=64, num_rows=8)
    assert find([1] * 9 + [2]) == PromptSize(num_tokens=64, num_rows=32)
    assert find([1] * 40 + [2]) == PromptSize(num_tokens=128, num_rows=64)
    assert find([257]) is None
    assert find([1] * 200 + [2]) is None, "more rows than any graph has"
    assert find([20], MAX_SEQ_LEN) is None


def test_what_a_graph_sees(seen: list[ForwardBatch]) -> None:
    """After a step that filled all of it, too."""
    size = PromptSize(num_tokens=32, num_rows=4)
    graphs = make_graphs(seen, (size,))
    graphs.replay(make_step([1, 9, 3, 19], [5, 0, 7, 0], GEOMETRIES, device=CPU), size)
    step = make_step([1, 20], [40, 3], GEOMETRIES, device=CPU)
    hidden = graphs.replay(step, size)
    assert hidden.tolist() == torch.stack((step.input_ids, step.positions), 1).tolist()
    batch = seen[-1]
    assert len(batch.input_ids) == len(batch.positions) == 32
    assert batch.cu_query_lens.tolist() == [0, 1, 21, 21, 21]
    assert batch.seq_lens.tolist() == [41, 23, 0, 0]
    assert batch.computed_lens is not None
    assert batch.computed_lens[:2].tolist() == [40, 3]
    assert (batch.max_query_len, batch.max_seq_len, batch.num_decode_rows) == (32, 64, 0)
    paged, state = batch.groups
    assert paged.block_offsets[:2, :3].tolist() == [[6, 6, 6]] * 2
    assert paged.slots.tolist() == [[-1, -1]] * 32
    assert state.block_offsets[:2].tolist() == [[8], [8]]
