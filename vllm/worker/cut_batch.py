"""Where tokens of prompts stay behind: the batches of the upper layers of a step.

Called by the input batches with the lengths of the rows on the host; nothing waits for the device.
A row is cut at the same places in all of its steps, so that no layer ever reads a row of its cache
that was not computed. Which layers need which tokens is said by whoever knows what layers keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vllm.batch import Cut, ForwardBatch, GroupBatch
from vllm.step import find_first_token
from vllm.worker.block_table import Int64Array

Sender = Callable[[Sequence[Int64Array]], Sequence[Tensor]]
"""Brings int64 arrays to the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPoints:
    """Where a model lets tokens stay behind.

    Attributes:
        reaches: (layer, the last tokens before a goal that go on behind it), layers ascending; a
            layer that is not named passes all of them on. See NewRow for the goal.
        last_keeper: behind this layer only tokens go on that need logits, which find in the cache
            all that they see: none of the layers there keeps anything. None where they do.
    """

    reaches: tuple[tuple[int, int], ...] = ()
    last_keeper: int | None = None


NO_CUTS = CutPoints()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLens:
    """The rows of a step, decode rows first. All arrays are int64.

    Attributes:
        new, computed: [B], tokens of the step and before it.
        goals: [B], see NewRow; 0 for a row all of whose tokens go on to the end.
        sampled: [L], indices of the rows that need logits, ascending.
    """

    new: Int64Array
    computed: Int64Array
    goals: Int64Array
    sampled: Int64Array

    def find_firsts(self, reach: int, grain_tokens: int) -> Int64Array:
        """Return the first token of each row that goes on, [B]; 0 where nobody stays behind.

        A row that only appends a token reads what has been computed for the goal: it is not cut.
        """
        is_past = (self.new == 1) & (self.computed + 1 >= self.goals)
        firsts = [find_first_token(int(goal), reach, grain_tokens) for goal in self.goals]
        return np.where(is_past, 0, np.array(firsts, dtype=np.int64))

    def keep_from(self, firsts: Int64Array) -> tuple[RowLens, Int64Array, Int64Array]:
        """Return what is left of the rows, their indices and those of their tokens.

        Args:
            firsts: [B], tokens before them stay behind and are no longer counted.
        """
        starts = np.maximum(self.computed, firsts)
        return self._keep(np.maximum(0, self.computed + self.new - starts), firsts)

    def keep_sampled(self) -> tuple[RowLens, Int64Array, Int64Array]:
        """Return the same where rows that need logits go on with their last token."""
        kept = np.zeros_like(self.new)
        kept[self.sampled] = 1
        return self._keep(kept, np.zeros_like(self.new))

    def _keep(self, kept: Int64Array, firsts: Int64Array) -> tuple[RowLens, Int64Array, Int64Array]:
        """Let the last `kept` tokens of each row go on, and count from `firsts` on; [B] each."""
        starts = self.computed + self.new - kept
        rows = np.flatnonzero(kept)
        new = kept[rows]
        stops = np.cumsum(self.new)[rows]  # of each row's tokens in the step
        tokens = np.arange(new.sum()) + np.repeat(stops - np.cumsum(new), new)
        left = RowLens(
            new=new,
            computed=(starts - firsts)[rows],
            goals=np.maximum(0, self.goals - firsts)[rows],
            sampled=np.searchsorted(rows, self.sampled),  # a sampled row keeps its last token
        )
        return left, rows, tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutRows:
    """One cut of a step on the host. All arrays are int64.

    Attributes:
        layer: behind whose mixer tokens stay behind.
        left: the rows that go on.
        firsts: [B'], tokens of each of them that are no longer counted.
        rows: [B'], their indices before the cut.
        tokens: [T'], indices of their tokens before the cut.
    """

    layer: int
    left: RowLens
    firsts: Int64Array
    rows: Int64Array
    tokens: Int64Array

    @property
    def bounds(self) -> Int64Array:
        """Tokens before each row that goes on, [B' + 1]."""
        return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(self.left.new)))

    def list_sent(self) -> list[Int64Array]:
        """Return what the device gets, in the order of `cut`."""
        left, bounds = self.left, self.bounds
        seq_lens, logits_rows = left.computed + left.new, bounds[left.sampled + 1] - 1
        return [self.tokens, self.rows, self.firsts, bounds, seq_lens, left.computed, logits_rows]

    def cut(self, batch: ForwardBatch, sent: Sequence[Tensor]) -> ForwardBatch:
        """Return what goes on of a batch; at least one row does."""
        tokens, rows, firsts, bounds, seq_lens, computed, logits_rows = sent
        new = self.left.new
        longest, is_decode = int((self.left.computed + new).max()), new == 1
        return ForwardBatch(
            input_ids=batch.input_ids[tokens],
            positions=batch.positions[tokens],
            cu_query_lens=bounds.to(torch.int32),
            seq_lens=seq_lens.to(torch.int32),
            logits_rows=logits_rows,
            groups=tuple(
                _cut_group(group, rows, tokens, firsts, longest) for group in batch.groups
            ),
            max_query_len=int(new.max()),
            max_seq_len=longest,
            num_decode_rows=len(new) if is_decode.all() else int(is_decode.argmin()),
            new_lens_cpu=tuple(new.tolist()),
            computed_lens_cpu=tuple(self.left.computed.tolist()),
            computed_lens=computed.to(torch.int32),
            kept_rows=None if batch.kept_rows is None else logits_rows,
        )


def make_cut(
    batch: ForwardBatch, lens: RowLens, points: CutPoints, grain_tokens: int, send: Sender
) -> Cut | None:
    """Return where tokens of a step first stay behind, or None if all go on to the end.

    Args:
        batch: the step, not padded.
        lens: its rows.
        points: of the model.
        grain_tokens: see `find_first_token`.
        send: to the device of the batch, once.
    """
    plan = _plan_cuts(lens, points, grain_tokens, has_kept=batch.kept_rows is not None)
    arrays = [rows.list_sent() for rows in plan]
    sent = iter(send([array for part in arrays for array in part])) if plan else iter(())
    made: list[tuple[CutRows, Tensor, ForwardBatch | None]] = []
    for rows, part in zip(plan, arrays, strict=True):
        tensors = [next(sent) for _ in part]
        if len(rows.rows):
            batch = rows.cut(batch, tensors)
        made.append((rows, tensors[0], batch if len(rows.rows) else None))
    cut: Cut | None = None
    for rows, tokens, inner in reversed(made):
        above = None if inner is None else replace(inner, cut=cut)
        cut = Cut(layer=rows.layer, tokens=tokens, batch=above)
    return cut


def _plan_cuts(
    lens: RowLens, points: CutPoints, grain_tokens: int, *, has_kept: bool
) -> list[CutRows]:
    """Return the cuts of a step, up to the one behind which nothing is left."""
    plan: list[CutRows] = []
    layer = points.last_keeper
    if layer is not None and has_kept and len(lens.sampled) < lens.new.sum():
        left, rows, tokens = lens.keep_sampled()
        firsts = np.zeros_like(rows)
        return [CutRows(layer=layer, left=left, firsts=firsts, rows=rows, tokens=tokens)]
    for layer, reach in points.reaches:
        firsts = lens.find_firsts(reach, grain_tokens)
        if not firsts.any():
            continue
        lens, rows, tokens = lens.keep_from(firsts)
        plan.append(CutRows(layer=layer, left=lens, firsts=firsts[rows], rows=rows, tokens=tokens))
        if not len(rows):
            break
    return plan


def _cut_group(
    group: GroupBatch, rows_B: Tensor, tokens_T: Tensor, firsts_B: Tensor, longest: int
) -> GroupBatch:
    """Return the tables of some rows from some token on, and the slots of some tokens."""
    offsets = group.block_offsets[rows_B]
    width = -(-longest // group.block_tokens)
    columns = torch.arange(width, device=offsets.device) + firsts_B[:, None] // group.block_tokens
    return GroupBatch(
        block_offsets=offsets.gather(1, columns.clamp_(max=offsets.shape[1] - 1)),
        slots=group.slots[tokens_T],
        block_tokens=group.block_tokens,
    )
