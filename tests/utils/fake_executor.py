"""A worker without a model, for tests of the scheduler.

It keeps a simulated KV cache: every (group, block, row) holds the position and token that were
written there, every block of a state its position and a running hash of all tokens before it. The
next token of a row is a hash of all tokens that its block table lets it see, so a wrong table, a
missing copy, a premature free or a missing zeroing shows up as a wrong token or a failed check.
Runs every plan at once and in order, as a device stream would.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm.cache_spec import CacheLayout, Chunk, KVCacheGroup, State, Window
from vllm.step import NewRow, RowOutput, RowSampling, StepOutput, StepPlan, TokenLogprobs

VOCAB = 50
EOS = 0


def next_token(history: Sequence[int], branch: int, seed: int) -> int:
    """Return the token after `history`: a function of all of it, the branch and the seed."""
    digest = hashlib.blake2b(array("i", history).tobytes(), digest_size=8, salt=b"model")
    digest.update(f"{branch}/{seed}".encode())
    return int.from_bytes(digest.digest(), "little") % VOCAB


def hash_state(history: Sequence[int]) -> int:
    """Return the state that `history` leads to: a function of all of it."""
    digest = hashlib.blake2b(array("i", history).tobytes(), digest_size=8, salt=b"state")
    return int.from_bytes(digest.digest(), "little")


def _is_state(group: KVCacheGroup) -> bool:
    return isinstance(group.lifetime, State)


def generate(
    prompt: Sequence[int],
    *,
    branch: int,
    seed: int,
    max_tokens: int,
    ends: Sequence[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """Return what an unloaded engine must produce."""
    history, output = list(prompt), []
    while len(output) < max_tokens:
        token = next_token(history, branch, seed)
        history.append(token)
        output.append(token)
        if token in ends and len(output) >= min_tokens:
            break
    return output


@dataclass
class _Row:
    new: NewRow
    token_ids: list[int]
    tables: list[list[int]]
    num_computed: int


@dataclass
class FakeExecutor:
    """Runs plans on a simulated cache.

    Attributes:
        max_rows: rows that the batch can hold.
        num_rows_run, num_tokens_run: what was computed so far.
    """

    groups: Sequence[KVCacheGroup]
    layout: CacheLayout
    max_rows: int = 10_000
    max_tokens: int = 1_000_000
    rows: dict[int, _Row] = field(default_factory=dict)
    num_rows_run: int = 0
    num_tokens_run: int = 0
    fail_rows: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self._cells: list[dict[int, dict[int, tuple[int, int]]]] = [{} for _ in self.groups]
        self._writer: dict[int, int] = {}
        self._states = [g for g, group in enumerate(self.groups) if _is_state(group)]

    def run(self, plan: StepPlan) -> StepOutput:
        """Carry out a plan in the order that StepPlan promises."""
        for seq_id in plan.dropped:
            del self.rows[seq_id]
        for superblock in plan.zero_superblocks:
            self._zero(superblock)
        for new in plan.new_rows:
            assert new.seq_id not in self.rows, "a row enters twice"
            self.rows[new.seq_id] = _Row(
                new, list(new.token_ids), [list(ids) for ids in new.block_ids],
                new.num_computed_tokens,
            )  # fmt: skip
        assert len(self.rows) <= self.max_rows, "more rows than seats"
        assert plan.num_tokens <= self.max_tokens, "token budget exceeded"
        self._copy(plan)
        ones = [row.num_new_tokens == 1 for row in plan.rows]
        assert ones == sorted(ones, reverse=True), "rows with one token come first"
        assert len({row.seq_id for row in plan.rows}) == len(plan.rows), "a row is planned twice"
        for planned in plan.rows:
            row = self.rows[planned.seq_id]
            assert planned.num_computed_tokens == row.num_computed, "the worker is elsewhere"
            assert planned.num_new_tokens > 0
            for table, fresh in zip(row.tables, planned.new_block_ids, strict=True):
                table.extend(fresh)
            self._write(row, planned.num_new_tokens)
            self._advance_states(row, planned.num_new_tokens)
        working = [(g, self.rows[r.seq_id].tables[g][0]) for r in plan.rows for g in self._states]
        assert len(set(working)) == len(working), "two rows work on one state"
        # Reads come after all writes: a block given to two rows in one step shows up.
        outputs = [
            self._read(self.rows[r.seq_id], r.num_new_tokens, r.num_samples) for r in plan.rows
        ]
        return StepOutput(step=plan.step, rows=outputs)

    def _copy(self, plan: StepPlan) -> None:
        """Run the copies at once, as a parallel kernel may."""
        sources = {(copy.group, copy.source) for copy in plan.copies}
        targets = [(copy.group, copy.target) for copy in plan.copies]
        assert len(set(targets)) == len(targets), "two copies into one block"
        assert sources.isdisjoint(targets), "a block is source and target in one step"
        copies = [
            (copy, dict(self._cells[copy.group].get(copy.source, {}))) for copy in plan.copies
        ]
        for copy, content in copies:
            self._claim(copy.group, copy.target)
            self._cells[copy.group][copy.target] = content

    def _advance_states(self, row: _Row, num_new: int) -> None:
        """Let the states of a row consume the step's tokens; they must be where the row is."""
        start, end = row.num_computed, row.num_computed + num_new
        for group in self._states:
            table = row.tables[group]
            assert len(table) == 1, "one working block for each sequence"
            self._claim(group, table[0])
            if start:
                state = self._cells[group].get(table[0], {}).get(0)
                expected = (start, hash_state(row.token_ids[:start]))
                assert state == expected, (
                    f"the state of group {group} is at {state}, not {expected}"
                )
            self._cells[group][table[0]] = {0: (end, hash_state(row.token_ids[:end]))}

    def _zero(self, superblock: int) -> None:
        for group, layout in enumerate(self.layout.groups):
            per = layout.blocks_per_superblock
            for block in range(superblock * per, (superblock + 1) * per):
                self._cells[group].pop(block, None)
        self._writer.pop(superblock, None)

    def _claim(self, group: int, block: int) -> None:
        superblock = block // self.layout.groups[group].blocks_per_superblock
        assert 0 <= superblock < self.layout.num_superblocks, "block id outside the arena"
        writer = self._writer.setdefault(superblock, group)
        assert writer == group, "a superblock changed owner without being zeroed"

    def _write(self, row: _Row, num_new: int) -> None:
        for group, layout in enumerate(self.layout.groups):
            size = layout.block_tokens
            table = row.tables[group]
            if group in self._states:
                continue
            for position in range(row.num_computed, row.num_computed + num_new):
                block = table[position // size]
                if block < 0:
                    continue
                self._claim(group, block)
                cells = self._cells[group].setdefault(block, {})
                cells[position % size] = (position, row.token_ids[position])

    def _history(self, row: _Row, end: int) -> list[int]:
        """Return the tokens at 0 … end-1 as the tables of all groups show them."""
        for group, layout in enumerate(self.layout.groups):
            size = layout.block_tokens
            for position in self._read_positions(group, row.num_computed, end):
                block = row.tables[group][position // size]
                cell = self._cells[group].get(block, {}).get(position % size)
                expected = (position, row.token_ids[position])
                assert cell == expected, (
                    f"group {group}, position {position}: cache holds {cell}, should be {expected}"
                )
        return row.token_ids[:end]

    def _read_positions(self, group: int, start: int, end: int) -> Iterable[int]:
        """Positions that a step from `start` to `end` reads from the cache of a group.

        Windows and chunks take the step's own tokens from the fresh keys and values.
        """
        lifetime = self.groups[group].lifetime
        if isinstance(lifetime, Window):
            first = max(0, start - lifetime.tokens + 1)
            return (*range(min(lifetime.sinks, start)), *range(first, start))
        if isinstance(lifetime, Chunk):
            return range(start // lifetime.tokens * lifetime.tokens, start)
        if isinstance(lifetime, State):
            return ()
        return range(end)

    def _read(self, row: _Row, num_new: int, num_samples: int) -> RowOutput:
        start = row.num_computed
        end = start + num_new
        self.num_rows_run += 1
        self.num_tokens_run += num_new
        sampling: RowSampling = row.new.sampling
        tokens: list[int] = []
        if row.new.seq_id in self.fail_rows:
            return RowOutput(seq_id=row.new.seq_id, token_ids=[], error="row failed")
        history = self._history(row, end)
        row.num_computed = end
        if num_samples:
            assert end == len(row.token_ids), "only the last known token is sampled from"
            first = row.new.branch
            tokens = [next_token(history, first + b, sampling.seed) for b in range(num_samples)]
            row.token_ids.append(tokens[0])
        logprobs = prompt_logprobs = None
        if sampling.num_logprobs is not None:
            logprobs = [TokenLogprobs(token_ids=[t], logprobs=[-0.5], rank=1) for t in tokens]
        prompt_start = start + 1
        if sampling.num_prompt_logprobs is not None:
            stop = min(end + 1, row.new.num_prompt_tokens)
            prompt_logprobs = [
                TokenLogprobs(token_ids=[row.token_ids[p]], logprobs=[-float(p)], rank=1)
                for p in range(prompt_start, stop)
            ]
        return RowOutput(
            seq_id=row.new.seq_id, token_ids=tokens, logprobs=logprobs,
            prompt_logprobs=prompt_logprobs, prompt_start=prompt_start,
        )  # fmt: skip
