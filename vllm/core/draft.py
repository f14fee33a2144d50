"""A step while it is planned: rows, new rows, copies, and the budget left."""

from __future__ import annotations

from vllm.core.cache_manager import NewBlocks
from vllm.core.roster import Roster
from vllm.sequence import Sequence
from vllm.step import BlockCopy, NewRow, PlanRow, StepPlan

_LEFTOVER_DIVISOR = 8
"""Less than this part of a step's tokens is too little to begin a prompt that must be cut."""


class StepDraft:
    """Collects what the scheduler decides for one step.

    Attributes:
        budget: tokens that may still be planned.
        is_short: some running sequence found no room or lost its place; nobody may be admitted.
        copies: blocks to copy before the step.
        decodes, decode_rows: sequences with one new token and their rows, in the same order.
    """

    __slots__ = (
        "_max_tokens", "_new_rows", "_no_blocks", "_prefill_rows", "_prefills", "_roster", "budget",
        "copies", "decode_rows", "decodes", "is_short",
    )  # fmt: skip

    def __init__(self, budget: int, roster: Roster, no_blocks: NewBlocks) -> None:
        self.budget = budget
        self._max_tokens = budget
        self.is_short = False
        self.copies: list[BlockCopy] = []
        self.decodes: list[Sequence] = []
        self.decode_rows: list[PlanRow] = []
        self._prefills: list[Sequence] = []
        self._prefill_rows: list[PlanRow] = []
        self._new_rows: list[NewRow] = []
        self._roster = roster
        self._no_blocks = no_blocks

    @property
    def may_begin_cut(self) -> bool:
        """Whether a prompt that a whole step could take may begin here and end in the next.

        Not in the small rest that other prompts leave: its tokens would save the next step little,
        but its attention would run twice, over a cached prefix the second time, and cut the prompts
        behind it in turn. Decode rows alone never keep it out, so that it waits for other prompts
        only.
        """
        return not self._prefills or _LEFTOVER_DIVISOR * self.budget >= self._max_tokens

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences of the rows, in their order."""
        return self.decodes + self._prefills

    def add_row(self, sequence: Sequence, num_new: int, blocks: NewBlocks) -> None:
        """Plan `num_new` tokens of a sequence; `blocks` are those just appended to its tables."""
        computed = sequence.num_computed_tokens
        total = len(sequence.token_ids) + sequence.num_pending_tokens
        is_last = computed + num_new == total
        num_samples = 0
        if is_last and total < sequence.max_len:
            num_samples = sequence.state.num_seats
        if not sequence.is_resident:
            self._new_rows.append(_make_new_row(sequence))
            blocks = self._no_blocks
        row = PlanRow(
            seq_id=sequence.seq_id,
            num_computed_tokens=computed,
            num_new_tokens=num_new,
            new_block_ids=blocks,
            num_samples=num_samples,
        )
        if num_new == 1:
            self.decode_rows.append(row)
            self.decodes.append(sequence)
        else:
            self._prefill_rows.append(row)
            self._prefills.append(sequence)
        if is_last:
            self._roster.prefilling.pop(sequence.seq_id, None)
        else:
            self._roster.prefilling[sequence.seq_id] = sequence
        sequence.num_computed_tokens = computed + num_new
        sequence.num_pending_tokens += 1 if num_samples else 0
        sequence.num_in_flight += 1
        self.budget -= num_new

    def make_plan(self, step: int, zero_superblocks: list[int]) -> StepPlan:
        """Return the plan; the roster's dropped rows go with it."""
        return StepPlan(
            step=step,
            dropped=self._roster.take_dropped(),
            zero_superblocks=zero_superblocks,
            new_rows=self._new_rows,
            copies=self.copies,
            rows=self.decode_rows + self._prefill_rows,
        )


def _make_new_row(sequence: Sequence) -> NewRow:
    sequence.is_resident = True
    return NewRow(
        seq_id=sequence.seq_id,
        branch=sequence.branch,
        token_ids=list(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=tuple(list(table) for table in sequence.cache.tables),
        sampling=sequence.sampling,
        goal=sequence.cache.goal,
        logits_processors=sequence.state.request.logits_processors,
    )
