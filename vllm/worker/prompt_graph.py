"""Small steps with prompts as CUDA graphs, where the host takes longer than the kernels.

Made by the GPU model runner. A graph serves every step of up to so many tokens and rows, whatever
its rows are: new prompts, later chunks, single tokens. Rows without tokens and tokens without a row
fill it up; kernels find rows by the bounds on the device, so that neither is read or written as
anything else. What a step holds is copied into tensors that stay where they are.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm.batch import ForwardBatch, GroupBatch
from vllm.logger import init_logger
from vllm.worker.block_table import GroupGeometry
from vllm.worker.cuda_graph import capture_step

logger = init_logger(__name__)

_TOKENS = (64, 128, 256, 384, 512, 768, 1024)
_FEW_ROWS = 8

MAX_SEQ_LEN = 4096
"""Of the rows of a step that a graph runs: it does not split the keys of rows with few new tokens
between programs, which longer rows need."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PromptSize:
    """What a graph has room for."""

    num_tokens: int
    num_rows: int


def list_prompt_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[PromptSize, ...]:
    """Return the sizes that get a graph, ascending: for few rows and, where more fit, for many."""
    sizes = set()
    for num_tokens in _TOKENS:
        if num_tokens <= max_num_batched_tokens:
            for num_rows in (_FEW_ROWS, num_tokens // 2):
                rows = min(num_rows, max_num_seqs)
                sizes.add(PromptSize(num_tokens=num_tokens, num_rows=rows))
    return tuple(sorted(sizes))


class PromptBuffers:
    """The tensors of such steps.

    Args:
        sizes: that views are asked for.
        max_model_len: longest row.
        geometries: the KV cache groups.
    """

    def __init__(
        self,
        sizes: Sequence[PromptSize],
        max_model_len: int,
        geometries: Sequence[GroupGeometry],
        device: torch.device,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_tokens = max(size.num_tokens for size in sizes)
        num_rows = max(size.num_rows for size in sizes)
        self._max_model_len = max_model_len
        self._input_ids = zeros(num_tokens, dtype=torch.int64)
        self._positions = zeros(num_tokens, dtype=torch.int64)
        self._bounds = zeros(num_rows + 1)
        self._seq_lens = zeros(num_rows)
        self._computed_lens = zeros(num_rows)
        self._no_rows = zeros(0, dtype=torch.int64)
        self._groups = []
        for geometry in geometries:
            is_state = geometry.is_per_sequence
            width = 1 if is_state else -(-(max_model_len + 1) // geometry.block_tokens)
            self._groups.append(
                GroupBatch(
                    block_offsets=zeros(num_rows, width),
                    slots=zeros(0 if is_state else num_tokens, 2),
                    block_tokens=geometry.block_tokens,
                )
            )

    def view(self, size: PromptSize) -> ForwardBatch:
        """Return the tensors of a size; the host says of its rows only how long they can be."""
        num_tokens, num_rows = size.num_tokens, size.num_rows
        return ForwardBatch(
            input_ids=self._input_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            cu_query_lens=self._bounds[: num_rows + 1],
            seq_lens=self._seq_lens[:num_rows],
            computed_lens=self._computed_lens[:num_rows],
            logits_rows=self._no_rows,
            groups=tuple(
                GroupBatch(
                    block_offsets=group.block_offsets[:num_rows],
                    slots=group.slots[:num_tokens],
                    block_tokens=group.block_tokens,
                )
                for group in self._groups
            ),
            max_query_len=num_tokens,
            max_seq_len=self._max_model_len,
            num_decode_rows=0,
        )

    def fill(self, batch: ForwardBatch, size: PromptSize) -> None:
        """Copy a step; behind it come tokens that no row has and rows that have no token."""
        num_tokens, num_rows = batch.input_ids.shape[0], batch.seq_lens.shape[0]
        self._input_ids[:num_tokens].copy_(batch.input_ids)
        self._positions[:num_tokens].copy_(batch.positions)
        self._bounds[: num_rows + 1].copy_(batch.cu_query_lens)
        self._bounds[num_rows + 1 : size.num_rows + 1].fill_(num_tokens)
        self._seq_lens[:num_rows].copy_(batch.seq_lens)
        self._seq_lens[num_rows : size.num_rows].zero_()
        assert batch.computed_lens is not None
        self._computed_lens[:num_rows].copy_(batch.computed_lens)
        for group, given in zip(self._groups, batch.groups, strict=True):
            width = given.block_offsets.shape[1]
            group.block_offsets[:num_rows, :width].copy_(given.block_offsets)
            if len(group.slots):
                group.slots[:num_tokens].copy_(given.slots)
                group.slots[num_tokens : size.num_tokens].fill_(-1)


class PromptGraphs:
    """The graphs of one model.

    Args:
        run: queues a forward pass on the current stream and returns its hidden states, [T, E].
        buffers: the tensors of its steps.
        sizes: ascending.
    """

    def __init__(
        self,
        run: Callable[[ForwardBatch], Tensor],
        buffers: PromptBuffers,
        sizes: Sequence[PromptSize],
    ) -> None:
        self._run = run
        self._buffers = buffers
        self.sizes = tuple(sizes)
        self._graphs: dict[PromptSize, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(self, pool: Any, *, only_largest: bool = False) -> None:
        """Capture the sizes, the largest first: the others find their memory in its pool."""
        started_s = time.perf_counter()
        sizes = self.sizes[-1:] if only_largest else self.sizes
        for size in reversed(sizes):
            run = partial(self._run, self._buffers.view(size))
            self._graphs[size] = capture_step(run, pool)
        logger.info(
            "Captured %d CUDA graphs of steps with prompts (up to %d tokens, %d rows) in %.2f s",
            len(sizes),
            sizes[-1].num_tokens,
            sizes[-1].num_rows,
            time.perf_counter() - started_s,
        )

    def find_size(self, batch: ForwardBatch) -> PromptSize | None:
        """Return the smallest captured size that serves a step, or None."""
        if batch.max_seq_len > MAX_SEQ_LEN:
            return None
        num_tokens, num_rows = batch.input_ids.shape[0], batch.seq_lens.shape[0]
        first = bisect_left(self.sizes, PromptSize(num_tokens=num_tokens, num_rows=0))
        for size in self.sizes[first:]:
            if size.num_rows >= num_rows and size in self._graphs:
                return size
        return None

    def replay(self, batch: ForwardBatch, size: PromptSize) -> Tensor:
        """Run a step by the graph of `size`; the result, [T, E], holds until the next replay."""
        self._buffers.fill(batch, size)
        graph, hidden_TE = self._graphs[size]
        graph.replay()
        return hidden_TE[: batch.input_ids.shape[0]]
