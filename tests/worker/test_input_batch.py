"""StepPlan to ForwardBatch, against an oracle that does one token at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from vllm.step import NewRow, PlanRow, RowSampling, StepPlan
from vllm.worker.block_table import BlockTable, GroupGeometry
from vllm.worker.input_batch import InputBatch, StepInput

GEOMETRIES = (
    GroupGeometry(
        block_tokens=4, blocks_per_superblock=3, superblock_units=20, block_units=6, pad_offset=4000
    ),
    GroupGeometry(
        block_tokens=16,
        blocks_per_superblock=1,
        superblock_units=20,
        block_units=19,
        pad_offset=4000,
    ),
)
MAX_LEN = 96


@dataclass
class Known:
    """What the oracle knows of a sequence."""

    seq_id: int
    tokens: list[int]
    computed: int = 0
    tables: tuple[list[int], ...] = field(default_factory=lambda: tuple([] for _ in GEOMETRIES))


class RandomPlans:
    """Random, valid plans over a changing set of sequences."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.known: dict[int, Known] = {}
        self.next_id = 0
        self.next_block = 0

    def make(self, step: int) -> tuple[StepPlan, list[Known]]:
        dropped = [i for i in self.known if self.random.random() < 0.1]
        for seq_id in dropped:
            del self.known[seq_id]
        fresh = []
        for _ in range(self.random.randrange(4)):
            known = Known(self.next_id, self._draw_tokens(self.random.randrange(1, 50)))
            known.computed = self.random.randrange(len(known.tokens))
            self.known[self.next_id] = known
            fresh.append(known)
            self.next_id += 1
        active = [k for k in self.known.values() if k in fresh or self.random.random() < 0.8]
        active = [k for k in active if len(k.tokens) < MAX_LEN]
        self.random.shuffle(active)
        new_rows, rows = [], []
        for known in active:
            left = len(known.tokens) - known.computed
            count = left if self.random.random() < 0.7 else self.random.randrange(1, left + 1)
            added = self._add_blocks(known, known.computed + count)
            if known in fresh:
                added = tuple([] for _ in GEOMETRIES)
                new_rows.append(
                    NewRow(
                        seq_id=known.seq_id,
                        branch=0,
                        token_ids=list(known.tokens),
                        num_prompt_tokens=len(known.tokens),
                        num_computed_tokens=known.computed,
                        block_ids=tuple(list(t) for t in known.tables),
                        sampling=RowSampling(),
                    )
                )
            rows.append(
                PlanRow(
                    seq_id=known.seq_id,
                    num_computed_tokens=known.computed,
                    num_new_tokens=count,
                    new_block_ids=added,
                    num_samples=int(count == left),
                )
            )
        for known in fresh:
            if known not in active:
                del self.known[known.seq_id]
        return StepPlan(step=step, dropped=dropped, new_rows=new_rows, rows=rows), active

    def _draw_tokens(self, count: int) -> list[int]:
        return [self.random.randrange(50_000) for _ in range(count)]

    def _add_blocks(self, known: Known, num_tokens: int) -> tuple[list[int], ...]:
        added = []
        for table, geometry in zip(known.tables, GEOMETRIES, strict=True):
            count = -(-num_tokens // geometry.block_tokens) - len(table)
            ids = [self.random.choice((-1, self.random.randrange(100))) for _ in range(count)]
            table.extend(ids)
            added.append(ids)
        return tuple(added)


def offset_of(block: int, geometry: GroupGeometry) -> int:
    if block == -1:
        return geometry.pad_offset
    return (
        block // geometry.blocks_per_superblock * geometry.superblock_units
        + block % geometry.blocks_per_superblock * geometry.block_units
    )


def check(
    step: StepInput, plan: StepPlan, known: dict[int, Known], *, is_padded: bool = True
) -> None:
    """Compare a step with the oracle; not `is_padded`: what lies behind a table is anything."""
    decode = [r for r in plan.rows if r.num_new_tokens == 1]
    ordered = decode + [r for r in plan.rows if r.num_new_tokens != 1]
    assert [r.seq_id for r in step.plan_rows] == [r.seq_id for r in ordered]
    ids, positions, starts, lens, logits_rows = [], [], [0], [], []
    slots: list[list[list[int]]] = [[] for _ in GEOMETRIES]
    for row in ordered:
        seq = known[row.seq_id]
        for position in range(
            row.num_computed_tokens, row.num_computed_tokens + row.num_new_tokens
        ):
            ids.append(seq.tokens[position])
            positions.append(position)
            for g, geometry in enumerate(GEOMETRIES):
                block = seq.tables[g][position // geometry.block_tokens]
                offset = -1 if block == -1 else offset_of(block, geometry)  # -1 is not stored
                slots[g].append([offset, position % geometry.block_tokens])
        starts.append(len(ids))
        lens.append(row.num_computed_tokens + row.num_new_tokens)
        if row.num_samples:
            logits_rows.append(len(ids) - 1)
    batch = step.batch
    for tensor, expected, dtype in (
        (batch.input_ids, ids, torch.int64),
        (batch.positions, positions, torch.int64),
        (batch.cu_query_lens, starts, torch.int32),
        (batch.seq_lens, lens, torch.int32),
        (batch.logits_rows, logits_rows, torch.int64),
    ):
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.tolist() == expected
    assert batch.max_seq_len == max(lens)
    assert batch.max_query_len == max(r.num_new_tokens for r in ordered)
    assert batch.num_decode_rows == len(decode)
    assert [ordered[i].num_samples for i in step.sampled] == [1] * len(logits_rows)
    for g, (group, geometry) in enumerate(zip(batch.groups, GEOMETRIES, strict=True)):
        assert group.slots.dtype == group.block_offsets.dtype == torch.int32
        assert group.slots.tolist() == slots[g]
        width = -(-max(lens) // geometry.block_tokens)
        assert group.block_offsets.shape == (len(ordered), width)
        for row, found in zip(ordered, group.block_offsets.tolist(), strict=True):
            table = [offset_of(b, geometry) for b in known[row.seq_id].tables[g]]
            stop = width if is_padded else len(table)
            assert found[:stop] == (table + [geometry.pad_offset] * width)[:stop]


@pytest.mark.parametrize("seed", range(8))
def test_random_plans_equal_the_oracle(seed: int) -> None:
    plans = RandomPlans(seed)
    batch = InputBatch(3, MAX_LEN, GEOMETRIES, torch.device("cpu"))
    for number in range(40):
        plan, active = plans.make(number)
        step = batch.apply(plan)
        if not plan.rows:
            assert step is None
            continue
        check(step, plan, plans.known)
        sampled = [step.rows[i] for i in step.sampled]
        tokens = [plans.random.randrange(50_000) for _ in sampled]
        batch.append_tokens(sampled, tokens)
        for row, token in zip(sampled, tokens, strict=True):
            plans.known[row.seq_id].tokens.append(token)
        for known, row in zip(active, plan.rows, strict=True):
            known.computed += row.num_new_tokens
        assert len(batch) == len(plans.known)


def test_dropping_an_unknown_sequence_is_harmless() -> None:
    batch = InputBatch(1, MAX_LEN, GEOMETRIES, torch.device("cpu"))
    assert batch.apply(StepPlan(step=0, dropped=[99])) is None


def test_an_error_token_is_not_appended() -> None:
    plans = RandomPlans(0)
    batch = InputBatch(1, MAX_LEN, GEOMETRIES, torch.device("cpu"))
    plan, _ = plans.make(0)
    while not plan.rows:
        plan, _ = plans.make(0)
    step = batch.apply(plan)
    row = step.rows[0]
    before = row.num_tokens, row.state.num_outputs
    batch.append_tokens([row], [-1])
    assert (row.num_tokens, row.state.num_outputs) == before


def test_a_table_widens_with_its_longest_row() -> None:
    table = BlockTable(GEOMETRIES[0], 2, 8000)
    table.set_row(0, [3])
    table.set_row(1, list(range(700)))
    table.append(1, [7, 8, 9])
    expected = [offset_of(b, GEOMETRIES[0]) for b in [*range(700), 7, 8, 9]]
    found = table.gather(np.array([1, 0]), 703 * 4).tolist()
    assert found == [expected, [expected[3]] + [4000] * 702]


def test_a_reused_row_does_not_show_the_old_table() -> None:
    table = BlockTable(GEOMETRIES[0], 2, MAX_LEN)
    table.set_row(1, list(range(10)))
    table.set_row(1, [5])
    assert table.gather(np.array([1]), 12).tolist() == [[offset_of(5, GEOMETRIES[0]), 4000, 4000]]
