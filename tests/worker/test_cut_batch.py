"""Cuts of random steps: which tokens go on, what tables say, and that no layer reads a gap."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm.batch import Cut, ForwardBatch, GroupBatch
from vllm.worker.block_table import Int64Array
from vllm.worker.cut_batch import CutPoints, RowLens, make_cut

GRAIN = 8
BLOCK_TOKENS = (4, 8)
WINDOWS = (9, 3, 17)
"""Of the layers above layer 0, which keeps every token."""


def list_reaches() -> tuple[tuple[int, int], ...]:
    """Return how many tokens go on behind each layer, counted one layer after the other."""
    reaches, needed = [], 1
    for layer in reversed(range(len(WINDOWS))):
        needed += WINDOWS[layer] - 1
        reaches.append((layer, needed))
    return tuple(reaches[::-1])


REACHES = list_reaches()
POINTS = CutPoints(reaches=REACHES)


def send(arrays: Sequence[Int64Array]) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


def make_step(new: Int64Array, computed: Int64Array, sampled: list[int]) -> ForwardBatch:
    """Return a step whose positions, slots and tables say which row and token they are of."""
    bounds = np.concatenate(([0], np.cumsum(new)))
    rows = np.repeat(np.arange(len(new)), new)
    positions = np.arange(bounds[-1]) + np.repeat(computed - bounds[:-1], new)
    longest = int((new + computed).max())
    groups = []
    for block_tokens in BLOCK_TOKENS:
        width = -(-longest // block_tokens)
        table = 1000 * np.arange(len(new))[:, None] + np.arange(width)[None]
        slots = np.stack((1000 * rows + positions // block_tokens, positions % block_tokens), 1)
        groups.append(
            GroupBatch(
                block_offsets=torch.from_numpy(table.astype(np.int32)),
                slots=torch.from_numpy(slots.astype(np.int32)),
                block_tokens=block_tokens,
            )
        )
    logits_rows = torch.from_numpy(bounds[1:][sampled] - 1)
    return ForwardBatch(
        input_ids=torch.from_numpy(10000 * rows + positions),
        positions=torch.from_numpy(positions),
        cu_query_lens=torch.from_numpy(bounds.astype(np.int32)),
        seq_lens=torch.from_numpy((new + computed).astype(np.int32)),
        logits_rows=logits_rows,
        groups=tuple(groups),
        max_query_len=int(new.max()),
        max_seq_len=longest,
        num_decode_rows=int((new == 1).sum()),
        kept_rows=logits_rows,
    )


def walk(cut: Cut | None) -> list[Cut]:
    """Return the cuts of a step, outermost first."""
    cuts = []
    while cut is not None:
        cuts.append(cut)
        cut = None if cut.batch is None else cut.batch.cut
    return cuts


class Sequences:
    """Prompts of random lengths in random chunks, and what each layer has computed of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        count = self.random.randrange(1, 6)
        self.lens = [self.random.randrange(2, 120) for _ in range(count)]
        self.goals = [self.random.choice((n, n, max(1, n - 8), n // 2)) for n in self.lens]
        self.computed = [0] * count
        self.known: list[list[set[int]]] = [[set() for _ in range(count)] for _ in WINDOWS]

    def draw_step(self) -> tuple[list[int], list[int]]:
        """Return rows and their new tokens, rows of one token first."""
        rows = [i for i in range(len(self.lens)) if self.random.random() < 0.8] or [0]
        new = {}
        for row in rows:
            left = self.lens[row] - self.computed[row]
            new[row] = (
                1 if left <= 0 else self.random.choice((1, left, self.random.randrange(left) + 1))
            )
        rows.sort(key=lambda row: new[row] != 1)
        return rows, [new[row] for row in rows]

    def run_layer(self, layer: int, row: int, first: int, tokens: range) -> None:
        """A layer computes tokens of a row whose sequence begins at `first` for it."""
        known = self.known[layer][row]
        known.update(tokens)
        for token in tokens:
            seen = range(max(first, token - WINDOWS[layer] + 1), token + 1)
            assert known.issuperset(seen), (layer, row, token)


@pytest.mark.parametrize("seed", range(40))
def test_no_layer_reads_what_was_not_computed(seed: int) -> None:
    sequences = Sequences(seed)
    for _ in range(12):
        rows, counts = sequences.draw_step()
        new = np.array(counts, dtype=np.int64)
        computed = np.array([sequences.computed[row] for row in rows], dtype=np.int64)
        ends = [sequences.computed[row] + n for row, n in zip(rows, counts, strict=True)]
        sampled = [i for i, row in enumerate(rows) if ends[i] >= sequences.lens[row]]
        lens = RowLens(
            new=new,
            computed=computed,
            goals=np.array([sequences.goals[row] for row in rows], dtype=np.int64),
            sampled=np.array(sampled, dtype=np.int64),
        )
        batch: ForwardBatch | None = make_step(new, computed, sampled)
        assert batch is not None
        cuts = walk(make_cut(batch, lens, POINTS, GRAIN, send))
        for layer in range(len(WINDOWS)):
            if batch is not None and cuts and cuts[0].layer <= layer:
                batch = check_cut(batch, cuts.pop(0))
            if batch is not None:
                run_rows(sequences, layer, rows, batch)
        for row, end in zip(rows, ends, strict=True):
            sequences.computed[row] = end
        if batch is not None:
            assert batch.input_ids[batch.logits_rows].tolist() == [
                10000 * i + ends[i] - 1 for i in sampled
            ]


def run_rows(sequences: Sequences, layer: int, rows: list[int], batch: ForwardBatch) -> None:
    bounds = batch.cu_query_lens.tolist()
    for i, seq_len in enumerate(batch.seq_lens.tolist()):
        ids = batch.input_ids[bounds[i] : bounds[i + 1]]
        row, start = divmod(int(ids[0]), 10000)
        first = start + len(ids) - seq_len
        assert ids.tolist() == list(range(int(ids[0]), int(ids[0]) + len(ids)))
        for group in batch.groups:
            blocks = -(-seq_len // group.block_tokens)
            expected = 1000 * row + first // group.block_tokens + torch.arange(blocks)
            assert group.block_offsets[i, :blocks].tolist() == expected.tolist()
        sequences.run_layer(layer, rows[row], first, range(start, start + len(ids)))


def check_cut(batch: ForwardBatch, cut: Cut) -> ForwardBatch | None:
    """Check what a cut gives of its batch that does not depend on what is computed."""
    inner = cut.batch
    if inner is None:
        assert not len(cut.tokens)
        assert not len(batch.logits_rows)
        return None
    assert inner.input_ids.tolist() == batch.input_ids[cut.tokens].tolist()
    assert inner.positions.tolist() == batch.positions[cut.tokens].tolist()
    for group, before in zip(inner.groups, batch.groups, strict=True):
        assert group.slots.tolist() == before.slots[cut.tokens].tolist()
    new = inner.cu_query_lens.diff()
    assert inner.new_lens_cpu == tuple(new.tolist())
    assert inner.max_query_len == int(new.max())
    assert inner.max_seq_len == int(inner.seq_lens.max())
    assert inner.computed_lens is not None
    assert inner.computed_lens_cpu == tuple(inner.computed_lens.tolist())
    assert inner.computed_lens.tolist() == (inner.seq_lens - new).tolist()
    assert bool((new[: inner.num_decode_rows] == 1).all())
    return inner


def test_short_prompts_are_not_cut() -> None:
    new, computed = np.array([1, 20, 26]), np.array([200, 0, 0])
    lens = RowLens(new=new, computed=computed, goals=np.array([150, 20, 26]), sampled=np.arange(3))
    assert (
        make_cut(
            make_step(new, computed, [0, 1, 2]), lens, CutPoints(reaches=REACHES[:1]), GRAIN, send
        )
        is None
    )


def test_rows_without_a_goal_keep_all_their_tokens() -> None:
    new, computed = np.array([90, 90]), np.array([0, 0])
    lens = RowLens(new=new, computed=computed, goals=np.array([0, 90]), sampled=np.arange(2))
    cuts = walk(make_cut(make_step(new, computed, [0, 1]), lens, POINTS, GRAIN, send))
    assert [cut.layer for cut in cuts] == [layer for layer, _ in REACHES]
    for cut in cuts:
        assert cut.batch is not None
        assert cut.batch.new_lens_cpu[0] == 90


@pytest.mark.parametrize("has_kept", [True, False])
def test_behind_the_last_layer_that_keeps_something(has_kept: bool) -> None:
    """Only tokens that need logits go on; their sequences stay whole."""
    new, computed = np.array([1, 40, 3, 50]), np.array([30, 8, 0, 16])
    lens = RowLens(new=new, computed=computed, goals=computed + new, sampled=np.array([0, 1, 2]))
    batch = make_step(new, computed, [0, 1, 2])
    batch = batch if has_kept else replace(batch, kept_rows=None)
    cuts = walk(make_cut(batch, lens, CutPoints(last_keeper=5), GRAIN, send))
    if not has_kept:
        assert not cuts
        return
    (cut,) = cuts
    assert cut.layer == 5
    inner = check_cut(batch, cut)
    assert inner is not None
    assert inner.new_lens_cpu == (1, 1, 1)
    assert inner.seq_lens.tolist() == [31, 48, 3]
    assert inner.positions.tolist() == [30, 47, 2]
    assert inner.input_ids[inner.logits_rows].tolist() == [30, 10047, 20002]
    for group, before in zip(inner.groups, batch.groups, strict=True):
        width = group.block_offsets.shape[1]
        assert group.block_offsets.tolist() == before.block_offsets[:3, :width].tolist()


def test_decode_rows_have_nothing_to_leave_behind() -> None:
    new, computed = np.array([1, 1]), np.array([30, 8])
    lens = RowLens(new=new, computed=computed, goals=computed, sampled=np.arange(2))
    points = CutPoints(last_keeper=5)
    assert make_cut(make_step(new, computed, [0, 1]), lens, points, GRAIN, send) is None
