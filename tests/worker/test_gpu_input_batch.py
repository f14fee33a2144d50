"""The batch of a GPU, on a CPU: uploads go to host memory, its ops are their naive twins.

Tokens come to the host one step late, as they do where steps overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.test_input_batch import GEOMETRIES, MAX_LEN, Known, RandomPlans, check, offset_of
from vllm._custom_ops.naive import batch as naive
from vllm.step import NewRow, PlanRow, RowSampling, StepPlan
from vllm.worker import gpu_input_batch
from vllm.worker.block_table import Int64Array
from vllm.worker.cut_batch import CutPoints
from vllm.worker.gpu_input_batch import GpuInputBatch
from vllm.worker.input_batch import StepInput
from vllm.worker.prompt_size import PromptSize, list_prompt_sizes

SIZES = (1, 4, 16, 64)
PROMPT_SIZES = list_prompt_sizes(64, 4096)


class HostRing:
    """Stands in for the ring of pinned buffers."""

    def __init__(self, num_elements: int, device: torch.device) -> None:
        self._device = device

    def upload(self, arrays: Sequence[Int64Array], target: Tensor | None = None) -> list[Tensor]:
        joined = torch.from_numpy(np.concatenate(arrays))
        target = torch.empty_like(joined) if target is None else target
        target[: len(joined)] = joined
        return list(target[: len(joined)].split([len(array) for array in arrays]))


@pytest.fixture(autouse=True)
def _stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_input_batch, "StagingRing", HostRing)
    for name in ("prepare_decode_tokens", "prepare_decode_group"):
        monkeypatch.setattr(gpu_input_batch, name, getattr(naive, name))


def make_batch(prompt_sizes: Sequence[PromptSize]) -> GpuInputBatch:
    """Return an empty batch of at most 64 rows a step."""
    return GpuInputBatch(
        64,
        MAX_LEN,
        4096,
        GEOMETRIES,
        torch.device("cpu"),
        decode_sizes=SIZES,
        prompt_sizes=prompt_sizes,
    )


def make_decode_plan(plans: RandomPlans, number: int) -> tuple[StepPlan, list[Known]]:
    """One token for every sequence that has one left."""
    active = [
        k
        for k in plans.known.values()
        if k.computed + 1 == len(k.tokens) and k.computed + 1 < MAX_LEN
    ]
    rows = [
        PlanRow(
            seq_id=known.seq_id,
            num_computed_tokens=known.computed,
            num_new_tokens=1,
            new_block_ids=plans._add_blocks(known, known.computed + 1),
            num_samples=1,
        )
        for known in active
    ]
    return StepPlan(step=number, rows=rows), active


def check_decode(step: StepInput, active: list[Known]) -> None:
    """Rows are where they should be; padding reads nothing and is stored nowhere (trap 29)."""
    batch, num_rows = step.batch, len(active)
    num_padded = next(size for size in SIZES if size >= num_rows)
    padding = [0] * (num_padded - num_rows)
    assert batch.input_ids.tolist() == [k.tokens[k.computed] for k in active] + padding
    assert batch.positions.tolist() == [k.computed for k in active] + padding
    assert batch.seq_lens.tolist() == [k.computed + 1 for k in active] + padding
    for number, (group, geometry) in enumerate(zip(batch.groups, GEOMETRIES, strict=True)):
        slots = []
        for known, offsets in zip(active, group.block_offsets.tolist(), strict=False):
            table = [offset_of(b, geometry) for b in known.tables[number]]
            assert offsets[: len(table)] == table
            block, inside = divmod(known.computed, geometry.block_tokens)
            is_stored = known.tables[number][block] >= 0
            slots.append([table[block] if is_stored else -1, inside])
        assert group.slots[:num_rows].tolist() == slots
        assert (group.slots[num_rows:, 0] == -1).all()
        assert (group.block_offsets[num_rows:] == geometry.pad_offset).all()


def take_padding_away(step: StepInput, size: PromptSize) -> StepInput:
    """Return a padded step without what was added to it, which is checked."""
    batch, num_rows = step.batch, len(step.rows)
    num_decode = sum(row.num_new_tokens == 1 for row in step.plan_rows)
    first = size.num_decode_rows
    rows = [*range(num_decode), *range(first, first + num_rows - num_decode)]
    bounds = batch.cu_query_lens.tolist()
    tokens = [token for row in rows for token in range(bounds[row], bounds[row + 1])]
    added = [i for i in range(size.num_rows) if i not in rows]
    spare = [i for i in range(size.num_tokens) if i not in tokens]
    assert len(batch.seq_lens) == len(bounds) - 1 == size.num_rows
    assert len(batch.input_ids) == len(batch.positions) == size.num_tokens
    assert [bounds[i + 1] - bounds[i] for i in added] == [int(i < first) for i in added]
    assert not batch.seq_lens[added].any()
    longest = int(batch.seq_lens.max())
    groups = []
    for group, geometry in zip(batch.groups, GEOMETRIES, strict=True):
        assert (group.slots[spare, 0] == -1).all()
        assert (group.block_offsets[added] == geometry.pad_offset).all()
        offsets = group.block_offsets[rows, : -(-longest // geometry.block_tokens)]
        groups.append(replace(group, block_offsets=offsets, slots=group.slots[tokens]))
    lens = [bounds[row + 1] - bounds[row] for row in rows]
    assert batch.has_spare_tokens
    assert batch.kept_rows is batch.logits_rows
    assert len(batch.logits_rows) == size.num_rows
    logits_rows = batch.logits_rows[: len(step.sampled)].tolist()
    assert batch.computed_lens is not None
    return replace(
        step,
        batch=replace(
            batch,
            input_ids=batch.input_ids[tokens],
            positions=batch.positions[tokens],
            cu_query_lens=torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32),
            seq_lens=batch.seq_lens[rows],
            computed_lens=batch.computed_lens[rows],
            logits_rows=torch.tensor([tokens.index(i) for i in logits_rows]).long(),
            groups=tuple(groups),
            max_query_len=max(lens),
            max_seq_len=longest,
            num_decode_rows=num_decode,
        ),
    )


@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_random_plans_equal_the_oracle(seed: int, is_padded: bool) -> None:
    batch = make_batch(PROMPT_SIZES if is_padded else ())
    plans = RandomPlans(seed)
    late: list[tuple] = []
    num_decodes = num_padded = 0
    for number in range(60):
        plan, active = make_decode_plan(plans, number) if number % 2 else plans.make(number)
        step = batch.apply(plan)
        if step is None:
            assert not plan.rows
            continue
        if step.is_decode:
            batch.prepare_decode(len(step.batch.seq_lens))
            check_decode(step, active)
            num_decodes += 1
        else:
            if batch.prompt_size is not None:
                batch.prepare_prompts(batch.prompt_size)
                step = take_padding_away(step, batch.prompt_size)
                num_padded += 1
            check(step, plan, plans.known, is_padded=False)
            assert step.batch.computed_lens is not None
            assert step.batch.computed_lens.dtype is torch.int32
            computed = [row.num_computed_tokens for row in step.plan_rows]
            assert step.batch.computed_lens.tolist() == computed
        sampled = [step.rows[i] for i in step.sampled]
        tokens = [plans.random.randrange(50_000) for _ in sampled]
        late.append((sampled, [row.num_tokens for row in sampled], tokens))
        batch.advance(sampled, torch.tensor(tokens, dtype=torch.int64))
        if len(late) == 2:
            batch.settle(*late.pop(0))
        for row, token in zip(sampled, tokens, strict=True):
            plans.known[row.seq_id].tokens.append(token)
        for known, row in zip(active, plan.rows, strict=True):
            known.computed += row.num_new_tokens
    assert num_decodes > 10
    assert num_padded > 10 if is_padded else num_padded == 0


@pytest.mark.parametrize(
    ("reach", "num_logprobs", "is_padded"),
    [(64, None, False), (1990, None, True), (64, 1, True)],
    ids=["cut", "within_reach", "with_prompt_logprobs"],
)
def test_prompts_that_were_cut_are_not_padded(
    reach: int, num_logprobs: int | None, is_padded: bool
) -> None:
    """Padded steps let all tokens go on, which would read rows that were left out before."""
    num_tokens = 2000
    geometry = replace(GEOMETRIES[1], blocks_per_superblock=4, superblock_units=4 * 19)
    batch = GpuInputBatch(
        64,
        2 * num_tokens,
        4096,
        [geometry],
        torch.device("cpu"),
        prompt_sizes=PROMPT_SIZES,
        cuts=CutPoints(reaches=((3, reach),)),
    )
    blocks = list(range(-(-num_tokens // geometry.block_tokens)))
    sampling = RowSampling(num_prompt_logprobs=num_logprobs)
    new = NewRow(
        seq_id=0,
        branch=0,
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        block_ids=(blocks,),
        sampling=sampling,
    )
    first = make_prompt_row(0, 1100)
    step = batch.apply(StepPlan(step=0, new_rows=[new], rows=[first]))
    assert step is not None
    cut = step.batch.cut
    if not is_padded:
        assert batch.prompt_size is None
        assert cut is not None
        assert (cut.layer, cut.batch) == (3, None)
    step = batch.apply(StepPlan(step=1, rows=[make_prompt_row(1100, 100)]))
    assert step is not None
    has_sizes = batch.prompt_size is not None
    assert has_sizes == (is_padded and num_logprobs is None)
    assert (step.batch.cut is not None) == (not is_padded)


def make_prompt_row(num_computed: int, num_new: int) -> PlanRow:
    return PlanRow(
        seq_id=0,
        num_computed_tokens=num_computed,
        num_new_tokens=num_new,
        new_block_ids=([],),
        num_samples=0,
    )
