"""A step that is not one of decode rows alone: its rows and tokens on the host, padded or not, and
what the device gets of them.

Made by the GPU input batch once a step. No Python work for a single token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from torch import Tensor

from vllm.step import PlanRow
from vllm.worker.block_table import Int64Array
from vllm.worker.input_batch import BatchRow
from vllm.worker.prompt_size import PromptSize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedRows:
    """Rows in batch order, those of one new token first. All arrays are int64.

    Attributes:
        num_decode_rows: leading rows with one new token.
        token_ids, token_rows, positions: [T], of each new token; the id is negative where only the
            device knows it, the row is its place in the persistent arrays.
        rows, computed_lens, seq_lens: [B], of each row its place, and its tokens before and after.
        bounds: [B + 1], new tokens before each row.
        logits_rows, sampled_rows: [L], tokens whose logits are needed, places of their rows.
    """

    num_decode_rows: int
    token_ids: Int64Array
    token_rows: Int64Array
    positions: Int64Array
    rows: Int64Array
    computed_lens: Int64Array
    seq_lens: Int64Array
    bounds: Int64Array
    logits_rows: Int64Array
    sampled_rows: Int64Array

    @staticmethod
    def collect(
        plan_rows: Sequence[PlanRow],
        rows: Sequence[BatchRow],
        sampled: Sequence[int],
        token_ids: Int64Array,
    ) -> MixedRows:
        """Return the arrays of a step.

        Args:
            plan_rows: of the step, in batch order.
            rows: the sequences they belong to.
            sampled: indices of the rows that need logits.
            token_ids: [rows, tokens], what is known of every persistent row.
        """
        places: Int64Array = np.array([row.index for row in rows], dtype=np.int64)
        computed: Int64Array = np.array([r.num_computed_tokens for r in plan_rows], dtype=np.int64)
        new: Int64Array = np.array([r.num_new_tokens for r in plan_rows], dtype=np.int64)
        bounds = np.zeros(len(new) + 1, dtype=np.int64)
        np.cumsum(new, out=bounds[1:])
        token_rows = np.repeat(places, new)
        ramp: Int64Array = np.arange(len(token_rows), dtype=np.int64)
        positions = ramp + np.repeat(computed - bounds[:-1], new)
        return MixedRows(
            num_decode_rows=int(np.count_nonzero(new == 1)),
            token_ids=token_ids[token_rows, positions],
            token_rows=token_rows,
            positions=positions,
            rows=places,
            computed_lens=computed,
            seq_lens=computed + new,
            bounds=bounds,
            logits_rows=bounds[1:][sampled] - 1,
            sampled_rows=places[sampled],
        )

    @property
    def new_lens(self) -> Int64Array:
        """New tokens of each row, [B]."""
        return np.diff(self.bounds)

    def list_sent(self) -> list[Int64Array]:
        """Return what the device gets, in the order of SENT_ARRAYS."""
        return [getattr(self, name) for name in SENT_ARRAYS]

    def pad(self, size: PromptSize, pad_row: int) -> MixedRows:
        """Return the step with as many rows and tokens as a size has.

        Decode rows are followed by rows of one token whose length is 0 all the same, prompts by
        rows without tokens and by tokens without a row. As many tokens have logits as there are
        rows, those that are needed first.

        Args:
            size: at least as large as the step.
            pad_row: the place of all padding.
        """
        num_decode, num_padded = self.num_decode_rows, size.num_decode_rows
        shift = num_padded - num_decode  # of everything behind the decode rows

        def spread(values: Int64Array, length: int, pad: int = 0) -> Int64Array:
            padded: Int64Array = np.full(length, pad, dtype=np.int64)
            padded[:num_decode] = values[:num_decode]
            padded[num_padded : len(values) + shift] = values[num_decode:]
            return padded

        bounds: Int64Array = np.full(size.num_rows + 1, self.bounds[-1] + shift, dtype=np.int64)
        bounds[:num_padded] = np.arange(num_padded)
        bounds[num_padded : len(self.bounds) + shift] = self.bounds[num_decode:] + shift
        logits_rows: Int64Array = np.zeros(size.num_rows, dtype=np.int64)
        shifts = np.where(self.logits_rows < num_decode, 0, shift)
        logits_rows[: len(shifts)] = self.logits_rows + shifts
        return MixedRows(
            num_decode_rows=num_padded,
            token_ids=spread(self.token_ids, size.num_tokens),
            token_rows=spread(self.token_rows, size.num_tokens, pad_row),
            positions=spread(self.positions, size.num_tokens),
            rows=spread(self.rows, size.num_rows, pad_row),
            computed_lens=spread(self.computed_lens, size.num_rows),
            seq_lens=spread(self.seq_lens, size.num_rows),
            bounds=bounds,
            logits_rows=logits_rows,
            sampled_rows=self.sampled_rows,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentRows:
    """The arrays of MixedRows on the device, views of one tensor. All are int64.

    They are sent in the order in which they stand here.
    """

    token_ids: Tensor
    token_rows: Tensor
    positions: Tensor
    rows: Tensor
    computed_lens: Tensor
    seq_lens: Tensor
    bounds: Tensor
    logits_rows: Tensor
    sampled_rows: Tensor

    @staticmethod
    def read(parts: Sequence[Tensor]) -> SentRows:
        """Name the parts of an upload."""
        return SentRows(**dict(zip(SENT_ARRAYS, parts, strict=True)))

    @staticmethod
    def split(sent: Tensor, size: PromptSize) -> SentRows:
        """Return the parts of a padded step in the tensor that it was sent to.

        Graphs do not see how many rows are sampled: there is no place of any.
        """
        num_tokens, num_rows = size.num_tokens, size.num_rows
        lens = [num_tokens] * 3 + [num_rows] * 3 + [num_rows + 1, num_rows, 0]
        return SentRows.read(sent[: sum(lens)].split(lens))


SENT_ARRAYS = tuple(field.name for field in fields(SentRows))
"""What the device gets of MixedRows, in the order in which it is sent."""


def count_sent(size: PromptSize) -> int:
    """Return the most numbers that are sent of a padded step."""
    return 3 * size.num_tokens + 6 * size.num_rows + 1
