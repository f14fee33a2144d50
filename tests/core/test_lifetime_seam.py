"""A lifetime is one class and one row: a toy window runs through the whole of core unchanged.

Toy, because it is not what a release serves: this proves the seam, that is that block tables with
holes, early frees, skipped writes and prefix hits behind gaps need no edit anywhere else.
"""

from __future__ import annotations

import random

import pytest

from tests.core.builders import (
    Harness,
    expected_tokens,
    full_group,
    layout_of,
    make_request,
    scheduler_config,
)
from tests.core.invariants import check_scheduler
from tests.core.test_random_schedules import advance
from vllm.cache_spec import Full, KVCacheGroup, Window
from vllm.core.block import table
from vllm.core.block.abstract import BlockManager
from vllm.core.block.paged import PagedBlockManager
from vllm.core.need import count_superblocks, peak_blocks
from vllm.errors import ConfigError
from vllm.sequence import Sequence, SequenceStatus


class ToyWindow(BlockManager):
    """The last W tokens and the first sinks, in whole blocks."""

    def __init__(self, group: KVCacheGroup) -> None:
        super().__init__(group)
        assert isinstance(group.lifetime, Window)
        self.window = group.lifetime.tokens
        self.sinks = group.lifetime.sinks

    @property
    def first_mortal_entry(self) -> int:
        return -(-self.sinks // self.block_tokens)

    def num_entries(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def num_dead_entries(self, num_computed: int) -> int:
        return max(0, num_computed - self.window + 1) // self.block_tokens

    def skipped_entries(self, num_computed: int, num_new: int) -> tuple[int, int]:
        start = max(self.num_entries(num_computed), self.first_mortal_entry)
        return start, max(0, num_computed + num_new - self.window + 1) // self.block_tokens

    def stable_tokens(self, num_computed: int, num_new: int) -> int:
        total, size = num_computed + num_new, self.block_tokens
        next_death = self.window - 1 + (self.num_dead_entries(num_computed) + 1) * size
        return max(total, min(self.num_entries(total) * size, next_death))

    def can_resume(self, position: int, run_start: int, head_run: int) -> bool:
        return run_start <= max(0, position - self.window + 1) and head_run >= min(
            self.sinks, position
        )

    def first_resumed_entry(self, position: int) -> int:
        return self.num_dead_entries(position)

    def peak_need(self, max_len: int, max_chunk: int) -> int:
        widest = 2 * self.num_entries(self.window) + 1 + self.first_mortal_entry
        return min(self.num_entries(max_len), widest)


@pytest.fixture
def toy_row(monkeypatch):
    """One row in the table: the seam."""
    monkeypatch.setitem(table.BLOCK_MANAGERS, Window, ToyWindow)


def window_group(name: str, tokens: int, sinks: int, block_tokens: int) -> KVCacheGroup:
    base = full_group(name, block_tokens=block_tokens, layers=(1,))
    lifetime = Window(tokens=tokens, sinks=sinks)
    return KVCacheGroup(
        name=name,
        lifetime=lifetime,
        layers=base.layers,
        block_tokens=block_tokens,
        block_bytes=base.block_bytes,
        places=base.places,
    )


def test_without_a_row_the_lifetime_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(table, "BLOCK_MANAGERS", {Full: PagedBlockManager})
    with pytest.raises(ConfigError, match=r"'local' .*Window.*serves Full"):
        table.make_block_managers([window_group("local", 8, 0, 4)])


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules_with_windows(toy_row, seed):
    rng = random.Random(seed)
    max_len = 60
    local = window_group("local", rng.choice([3, 5, 8, 9, 17]), rng.choice([0, 0, 2]), 4)
    groups = rng.choice([[full_group(block_tokens=4), local], [local]])
    per = [rng.choice([1, 2, 5]) for _ in groups]
    managers = table.make_block_managers(groups)
    least = count_superblocks(peak_blocks(managers, max_len, max_len), per)
    config = scheduler_config(
        max_num_batched_tokens=rng.choice([8, 16, 64]), max_num_seqs=4, max_model_len=max_len
    )
    layout = layout_of(groups, rng.choice([least, 2 * least, 4 * least]), per)
    harness = Harness(groups, layout, config)
    overlap = rng.random() < 0.4
    requests = []
    watched: dict[int, Sequence] = {}

    def check() -> None:
        watched.update((s.seq_id, s) for s in harness.scheduler._roster.running)
        ended = [s for s in watched.values() if s.status is SequenceStatus.FINISHED]
        check_scheduler(harness, [s for s in ended if s.num_in_flight])

    harness.on_step = check
    for number in range(14):
        length = rng.randint(1, 50)
        prompt = [(i * i) % 50 for i in range(length)]
        request = make_request(
            str(number), prompt, max_tokens=rng.choice([1, 8, None]), n=rng.choice([1, 1, 2])
        )
        requests.append(request)
        harness.scheduler.add(request)
        for _ in range(rng.choice([0, 2, 10])):
            advance(harness, rng, overlap=overlap)
            check()
    harness.run(overlap=overlap)
    for request in requests:
        for branch in range(request.n):
            expected = expected_tokens(request, branch, max_len)
            assert harness.tokens[request.request_id, branch] == expected
    harness.assert_drained()


def test_a_long_chunk_stores_only_what_stays_visible(toy_row):
    groups = [full_group(block_tokens=4), window_group("local", 8, 0, 4)]
    harness = Harness(groups, layout_of(groups, 40, [1, 1]), scheduler_config())
    harness.scheduler.add(make_request("a", range(50), max_tokens=30))
    harness.step()
    new = harness.plans[0].new_rows[0]
    assert len(new.block_ids[0]) == len(new.block_ids[1]) == 13
    assert [block >= 0 for block in new.block_ids[1]] == [False] * 10 + [True] * 3
    for _ in range(20):
        harness.step()
        assert harness.cache.arena.num_held_blocks(1) <= 3
