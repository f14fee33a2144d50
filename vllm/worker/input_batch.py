"""The persistent rows of the batch, and how a StepPlan becomes a ForwardBatch.

The model runner calls `apply` once a step and `append_tokens` after sampling. Rows keep their token
ids, so that a decode step needs nothing but counts from the scheduler. No Python work for a single
token; for a decode row only what its plan row holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm.batch import ForwardBatch, GroupBatch
from vllm.model_executor.layers.sampling_state import SamplingState
from vllm.step import NewRow, PlanRow, StepPlan
from vllm.worker.block_table import BlockTable, GroupGeometry, Int64Array
from vllm.worker.cut_batch import NO_CUTS, CutPoints, RowLens, Sender, make_cut

_MIN_SPARED_TOKENS = 32
"""Of a step; with fewer the last MLP of all tokens costs less than leaving the fused layers."""

_KEY_PART = 512
"""Keys that attention on a CPU sums up at a time: where the first token that goes on behind a cut
is a multiple of it, a row gives the same bits whether it is cut or not."""


@dataclass(slots=True, eq=False)
class BatchRow:
    """One sequence that the worker knows.

    Attributes:
        index: its place in the persistent arrays.
        num_tokens: prompt and output tokens known.
        num_entry_tokens: cache rows that it came with.
        goal: see NewRow; 0 where none of its tokens may stay behind at a cut.
    """

    index: int
    seq_id: int
    num_tokens: int
    num_prompt_tokens: int
    num_entry_tokens: int
    goal: int
    state: SamplingState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """A step ready to run; all lists are in batch order (decode rows first, else as planned).

    Attributes:
        batch: the tensors.
        plan_rows: the plan's rows.
        rows: the sequences they belong to.
        sampled: indices (into the lists above) of the rows that need logits.
        order: plan index of each row, or None where the plan's order was kept.
        is_decode: whether every row has one new token and wants the next.
    """

    batch: ForwardBatch
    plan_rows: list[PlanRow]
    rows: list[BatchRow]
    sampled: list[int]
    order: list[int] | None
    is_decode: bool


class InputBatch:
    """All sequences on this worker.

    Args:
        max_num_seqs: rows to make room for; more are taken when they come.
        max_model_len: most tokens of a sequence.
        geometries: the KV cache groups.
        cuts: where tokens of prompts stay behind.
    """

    _first_token_grain = _KEY_PART

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        geometries: Sequence[GroupGeometry],
        device: torch.device,
        cuts: CutPoints = NO_CUTS,
    ) -> None:
        capacity = max(1, max_num_seqs)
        self._cuts = cuts
        block_tokens = (g.block_tokens for g in geometries if not g.is_per_sequence)
        self._cut_grain = math.lcm(self._first_token_grain, *block_tokens)
        self._device = device
        self._max_tokens = max_model_len + 1  # the token sampled at the last position
        self._token_ids: Int64Array = np.zeros((capacity, self._max_tokens), dtype=np.int64)
        self._tables = [self._make_table(g, capacity) for g in geometries]
        self._rows: dict[int, BatchRow] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._make_ramps(capacity)

    def __len__(self) -> int:
        return len(self._rows)

    def apply(self, plan: StepPlan) -> StepInput | None:
        """Let rows leave and enter, then build the tensors; None if nothing is to be computed."""
        for seq_id in plan.dropped:
            row = self._rows.pop(seq_id, None)
            if row is not None:
                self._free.append(row.index)
        for new in plan.new_rows:
            self._add(new)
        if not plan.rows:
            return None
        plan_rows = plan.rows
        order = None
        if any(row.num_new_tokens != 1 for row in plan_rows):
            order = sorted(range(len(plan_rows)), key=lambda i: plan_rows[i].num_new_tokens != 1)
            plan_rows = [plan_rows[i] for i in order]
        rows = [self._rows[row.seq_id] for row in plan_rows]
        for plan_row, row in zip(plan_rows, rows, strict=True):
            for table, block_ids in zip(self._tables, plan_row.new_block_ids, strict=False):
                if block_ids:
                    table.append(row.index, block_ids)
        sampled = [i for i, row in enumerate(plan_rows) if row.num_samples > 0]
        is_decode = order is None and len(sampled) == len(rows)
        return StepInput(
            batch=(
                self._build_decode(plan_rows, rows)
                if is_decode
                else self._build_mixed(plan_rows, rows, sampled)
            ),
            plan_rows=plan_rows,
            rows=rows,
            sampled=sampled,
            order=order,
            is_decode=is_decode,
        )

    def append_tokens(self, rows: Sequence[BatchRow], tokens: Sequence[int]) -> None:
        """Append the token sampled for each row; a negative one is an error and is skipped."""
        for row, token in zip(rows, tokens, strict=True):
            if token >= 0:
                self._token_ids[row.index, row.num_tokens] = token
                row.num_tokens += 1
                row.state.append(token)

    def get_tokens(self, row: BatchRow, start: int, stop: int) -> Int64Array:
        """Return tokens [start, stop) of a row, int64; a view."""
        return self._token_ids[row.index, start:stop]

    def _add(self, new: NewRow) -> None:
        assert new.seq_id not in self._rows, f"sequence {new.seq_id} is in the batch already"
        if not self._free:
            self._grow()
        index = self._free.pop()
        num_tokens = len(new.token_ids)
        has_logprobs = new.sampling.num_prompt_logprobs is not None
        goal = num_tokens if new.goal is None else new.goal
        self._token_ids[index, :num_tokens] = new.token_ids
        for table, block_ids in zip(self._tables, new.block_ids, strict=True):
            table.set_row(index, block_ids)
        self._rows[new.seq_id] = BatchRow(
            index=index,
            seq_id=new.seq_id,
            num_tokens=num_tokens,
            num_prompt_tokens=new.num_prompt_tokens,
            num_entry_tokens=new.num_computed_tokens,
            goal=0 if has_logprobs else goal,
            state=SamplingState(new),
        )

    def _make_table(self, geometry: GroupGeometry, num_rows: int) -> BlockTable:
        return BlockTable(geometry, num_rows, self._max_tokens)

    def _grow(self) -> None:
        old = len(self._token_ids)
        self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
        for table in self._tables:
            table.grow(2 * old)
        self._free.extend(range(2 * old - 1, old - 1, -1))
        self._make_ramps(2 * old)

    def _make_ramps(self, num_rows: int) -> None:
        """Make 0, 1, 2 …, of which decode steps take the beginning."""
        self._ramp_32 = torch.arange(num_rows + 1, dtype=torch.int32, device=self._device)
        self._ramp_64 = torch.arange(num_rows + 1, dtype=torch.int64, device=self._device)

    def _build_decode(self, plan_rows: list[PlanRow], rows: list[BatchRow]) -> ForwardBatch:
        """Build a step in which every row has one new token and wants the next: the common case.

        Written for few calls: after a forward pass caches are cold, and each costs microseconds.
        """
        num_rows = len(rows)
        lens = [row.num_computed_tokens for row in plan_rows]
        indices: Int64Array = np.array([row.index for row in rows], dtype=np.int64)
        positions: Int64Array = np.array(lens, dtype=np.int64)
        max_seq_len = max(lens) + 1
        return ForwardBatch(
            input_ids=self._tensor(self._token_ids[indices, positions]),
            positions=self._tensor(positions),
            cu_query_lens=self._ramp_32[: num_rows + 1],
            seq_lens=self._tensor(np.array(lens, dtype=np.int32) + np.int32(1)),
            logits_rows=self._ramp_64[:num_rows],
            groups=self._build_groups(indices, indices, positions, max_seq_len),
            max_query_len=1,
            max_seq_len=max_seq_len,
            num_decode_rows=num_rows,
        )

    def _build_mixed(
        self, plan_rows: list[PlanRow], rows: list[BatchRow], sampled: list[int]
    ) -> ForwardBatch:
        """Build any step; decode rows come first."""
        indices: Int64Array = np.array([row.index for row in rows], dtype=np.int64)
        computed: Int64Array = np.array([r.num_computed_tokens for r in plan_rows], dtype=np.int64)
        new: Int64Array = np.array([r.num_new_tokens for r in plan_rows], dtype=np.int64)
        seq_lens = computed + new
        cu_query_lens = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(new, out=cu_query_lens[1:])
        token_rows = np.repeat(indices, new)
        starts = np.repeat(computed - cu_query_lens[:-1], new)
        positions = np.arange(len(token_rows), dtype=np.int64) + starts
        max_seq_len = int(seq_lens.max())
        logits_rows = self._tensor(cu_query_lens[1:][sampled].astype(np.int64) - 1)
        is_worth_it = len(token_rows) - len(sampled) >= _MIN_SPARED_TOKENS
        batch = ForwardBatch(
            input_ids=self._tensor(self._token_ids[token_rows, positions]),
            positions=self._tensor(positions),
            cu_query_lens=self._tensor(cu_query_lens),
            seq_lens=self._tensor(seq_lens.astype(np.int32)),
            logits_rows=logits_rows,
            groups=self._build_groups(indices, token_rows, positions, max_seq_len),
            max_query_len=int(new.max()),
            max_seq_len=max_seq_len,
            num_decode_rows=int(np.count_nonzero(new == 1)),
            kept_rows=logits_rows if is_worth_it and not want_logprobs(plan_rows, rows) else None,
        )
        return self._cut(batch, rows, new, computed, sampled, self._send)

    def _cut(
        self,
        batch: ForwardBatch,
        rows: Sequence[BatchRow],
        new: Int64Array,
        computed: Int64Array,
        sampled: Sequence[int],
        send: Sender,
    ) -> ForwardBatch:
        """Return a step that is not padded with its cuts; `new` and `computed` are of its rows."""
        if self._cuts == NO_CUTS:
            return batch
        lens = RowLens(
            new=new,
            computed=computed,
            goals=np.array([row.goal for row in rows], dtype=np.int64),
            sampled=np.array(sampled, dtype=np.int64),
        )
        return replace(batch, cut=make_cut(batch, lens, self._cuts, self._cut_grain, send))

    def _send(self, arrays: Sequence[Int64Array]) -> list[Tensor]:
        return [self._tensor(array) for array in arrays]

    def _build_groups(
        self,
        indices: Int64Array,
        token_rows: Int64Array,
        positions: Int64Array,
        max_seq_len: int,
    ) -> tuple[GroupBatch, ...]:
        return tuple(
            GroupBatch(
                block_offsets=self._tensor(table.gather(indices, max_seq_len)),
                slots=self._tensor(table.get_slots(token_rows, positions)),
                block_tokens=table.geometry.block_tokens,
            )
            for table in self._tables
        )

    def _tensor(self, array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)


def want_logprobs(plan_rows: Sequence[PlanRow], rows: Sequence[BatchRow]) -> bool:
    """Whether a step predicts prompt tokens whose log-probabilities somebody wants."""
    return any(
        row.state.params.num_prompt_logprobs is not None
        and planned.num_computed_tokens + 1 < row.num_prompt_tokens
        for planned, row in zip(plan_rows, rows, strict=True)
    )
