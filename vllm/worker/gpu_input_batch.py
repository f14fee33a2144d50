"""The rows of the batch on a GPU: block tables and newest tokens live there, steps bring changes.

The GPU model runner calls `apply` once a step, `advance` when the step's tokens are chosen on the
device, and `settle` when they have come to the host. A step may be built before the tokens of the
one before it are known: such a row takes its token from the device's own memory. Decode steps and
small steps with prompts are padded to a few sizes and live in tensors that stay where they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm._custom_ops.batch import prepare_decode_group, prepare_decode_tokens
from vllm.batch import ForwardBatch, GroupBatch
from vllm.core.cache_manager import DEFAULT_GRAIN_TOKENS
from vllm.step import PlanRow, find_first_token
from vllm.worker.block_table import GroupGeometry, Int64Array
from vllm.worker.cut_batch import NO_CUTS, CutPoints
from vllm.worker.device_table import DeviceBlockTable
from vllm.worker.input_batch import BatchRow, InputBatch, want_logprobs
from vllm.worker.mixed_rows import SENT_ARRAYS, MixedRows, SentRows
from vllm.worker.prompt_buffers import PromptBuffers
from vllm.worker.prompt_size import PromptSize, find_prompt_size
from vllm.worker.staging import StagingRing

UNKNOWN_TOKEN = -1
_NUM_COLUMNS = 3  # of a decode row: place, computed tokens, token


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBuffers:
    """The tensors of decode steps at addresses that never change; graphs read and write them.

    Attributes:
        columns: int64 [rows, 3]: place in the persistent arrays (-1: padding), computed tokens,
            token (-1: only the device knows it).
        input_ids, positions: int64 [rows].
        seq_lens: int32 [rows].
        cu_query_lens: int32 [rows + 1], 0, 1, 2 …
        logits_rows: int64 [rows], 0, 1, 2 …
        block_offsets: int32 [rows, blocks] of each group.
        slots: int32 [rows, 2] of each group, [0, 2] for states.
    """

    columns: Tensor
    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    cu_query_lens: Tensor
    logits_rows: Tensor
    block_offsets: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]


class GpuInputBatch(InputBatch):
    """All sequences on this GPU.

    Args:
        max_num_seqs: most rows of a step.
        max_model_len: most tokens of a sequence.
        max_num_batched_tokens: most tokens of a step.
        geometries: the KV cache groups.
        decode_sizes: rows that decode steps are padded to, ascending.
        prompt_sizes: what small steps with prompts are padded to, ascending.
        cuts: see InputBatch.

    Attributes:
        last_tokens: int64 [rows + 1], the newest token of every persistent row, and one that
            padding reads.
        prompt_size: what the step with prompts that was built last was padded to, or None.
    """

    _first_token_grain = DEFAULT_GRAIN_TOKENS

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        geometries: Sequence[GroupGeometry],
        device: torch.device,
        decode_sizes: Sequence[int] = (),
        prompt_sizes: Sequence[PromptSize] = (),
        cuts: CutPoints = NO_CUTS,
    ) -> None:
        # Rows that a step drops stay until it comes, so that there may be more than it computes.
        num_rows = 2 * max_num_seqs
        self._device_tables: list[DeviceBlockTable] = []
        super().__init__(num_rows, max_model_len, geometries, device, cuts)
        self._max_model_len = max_model_len
        self._decode_sizes = tuple(decode_sizes)
        self._prompt_sizes = tuple(prompt_sizes)
        self._pad_row = num_rows
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        num_sent = len(SENT_ARRAYS) * max_num_batched_tokens  # about, where all are longest
        self._ring = StagingRing(max(num_sent, 1 << 16), device)
        self._sampled_places: Tensor | None = None
        self._decode = self._make_decode_buffers(max((max_num_seqs, *decode_sizes)))
        self._prompts = PromptBuffers(prompt_sizes, self._device_tables, max_model_len, device)
        self.prompt_size: PromptSize | None = None

    def view_decode(self, num_rows: int) -> ForwardBatch:
        """Return the fixed tensors of a decode step of `num_rows` rows, padding counted.

        Lengths are stated at their most: kernels read the true ones on the device.
        """
        buffers = self._decode
        return ForwardBatch(
            input_ids=buffers.input_ids[:num_rows],
            positions=buffers.positions[:num_rows],
            cu_query_lens=buffers.cu_query_lens[: num_rows + 1],
            seq_lens=buffers.seq_lens[:num_rows],
            logits_rows=buffers.logits_rows[:num_rows],
            groups=tuple(
                GroupBatch(
                    block_offsets=offsets[:num_rows],
                    slots=slots[:num_rows],
                    block_tokens=table.geometry.block_tokens,
                )
                for offsets, slots, table in zip(
                    buffers.block_offsets, buffers.slots, self._tables, strict=True
                )
            ),
            max_query_len=1,
            max_seq_len=self._max_model_len,
            num_decode_rows=num_rows,
        )

    def prepare_decode(self, num_rows: int) -> None:
        """Fill the tensors of `view_decode` from the columns; kernels only, also inside graphs."""
        buffers = self._decode
        rows, computed, tokens = buffers.columns[:num_rows].unbind(1)
        prepare_decode_tokens(
            buffers.input_ids[:num_rows],
            buffers.positions[:num_rows],
            buffers.seq_lens[:num_rows],
            rows,
            computed,
            tokens,
            self.last_tokens,
        )
        for table, offsets, slots in zip(
            self._device_tables, buffers.block_offsets, buffers.slots, strict=True
        ):
            prepare_decode_group(
                offsets[:num_rows],
                slots[:num_rows],
                rows,
                buffers.positions[:num_rows],
                table.offsets_device,
                table.geometry.block_tokens,
                table.geometry.pad_offset,
            )

    def view_prompts(self, size: PromptSize) -> ForwardBatch:
        """Return the fixed tensors of a padded step with prompts; see `view_decode`."""
        return self._prompts.view(size)

    def prepare_prompts(self, size: PromptSize) -> None:
        """Fill the tensors of `view_prompts` from what was sent; kernels only, as above."""
        self._prompts.prepare(size, self.last_tokens)

    def advance(self, rows: Sequence[BatchRow], next_ids: Tensor) -> None:
        """Let rows grow by the tokens just chosen, which only the device knows yet.

        Args:
            rows: the sampled rows of the step that `apply` built last.
            next_ids: int64 [rows] on the device.
        """
        assert self._sampled_places is not None
        self.last_tokens.index_copy_(0, self._sampled_places, next_ids)
        for row in rows:
            self._token_ids[row.index, row.num_tokens] = UNKNOWN_TOKEN
            row.num_tokens += 1

    def settle(self, rows: Sequence[BatchRow], positions: Sequence[int], ids: list[int]) -> None:
        """Write down tokens that have come to the host.

        Args:
            rows: as given to `advance`.
            positions: where each token stands in its sequence.
            ids: the tokens; a negative one is an error and is skipped.
        """
        for row, position, token in zip(rows, positions, ids, strict=True):
            if token < 0 or self._rows.get(row.seq_id) is not row:
                continue  # the row has left, and its place may be another's
            self._token_ids[row.index, position] = token
            row.state.append(token)

    def _make_table(self, geometry: GroupGeometry, num_rows: int) -> DeviceBlockTable:
        table = DeviceBlockTable(geometry, num_rows, self._max_tokens, self._device)
        self._device_tables.append(table)
        return table

    def _build_decode(self, plan_rows: list[PlanRow], rows: list[BatchRow]) -> ForwardBatch:
        """Send what is new of the rows; `prepare_decode` makes the tensors of it."""
        num_rows = len(rows)
        num_padded = self._pad_rows(num_rows)
        columns: Int64Array = np.full((num_padded, _NUM_COLUMNS), -1, dtype=np.int64)
        columns[:num_rows, 0] = [row.index for row in rows]
        columns[:num_rows, 1] = [row.num_computed_tokens for row in plan_rows]
        columns[:num_rows, 2] = self._token_ids[columns[:num_rows, 0], columns[:num_rows, 1]]
        self._send_changes()
        self._ring.upload([columns.reshape(-1)], self._decode.columns.view(-1))
        self._sampled_places = self._decode.columns[:num_rows, 0]
        return self.view_decode(num_padded)

    def _build_mixed(
        self, plan_rows: list[PlanRow], rows: list[BatchRow], sampled: list[int]
    ) -> ForwardBatch:
        """Build any step; decode rows come first."""
        mixed = MixedRows.collect(plan_rows, rows, sampled, self._token_ids)
        self._send_changes()
        has_logprobs = want_logprobs(plan_rows, rows)
        self.prompt_size = None
        # Padded steps give the hidden states of sampled tokens alone, and are never cut.
        if not has_logprobs and not self._have_been_cut(plan_rows, rows):
            self.prompt_size = find_prompt_size(
                self._prompt_sizes, mixed.new_lens, mixed.computed_lens
            )
        if self.prompt_size is None:
            batch = self._send_mixed(mixed, needs_all_rows=has_logprobs)
            new, computed = mixed.new_lens, mixed.computed_lens
            return self._cut(batch, rows, new, computed, sampled, self._ring.upload)
        return self._send_padded(mixed, self.prompt_size)

    def _have_been_cut(self, plan_rows: Sequence[PlanRow], rows: Sequence[BatchRow]) -> bool:
        """Whether earlier tokens of a prompt stayed behind, so that its next ones must be cut."""
        reaches = self._cuts.reaches
        if not reaches:
            return False
        least = min(reach for _, reach in reaches)
        return any(
            row.num_entry_tokens < planned.num_computed_tokens < row.goal - 1
            and find_first_token(row.goal, least, self._cut_grain) > row.num_entry_tokens
            for planned, row in zip(plan_rows, rows, strict=True)
        )

    def _send_padded(self, mixed: MixedRows, size: PromptSize) -> ForwardBatch:
        """Send a step's rows with padding; `prepare_prompts` makes the tensors of it."""
        padded = mixed.pad(size, self._pad_row)
        sent = SentRows.read(self._ring.upload(padded.list_sent(), self._prompts.sent))
        self._sampled_places = sent.sampled_rows
        return self._prompts.view(size)

    def _send_mixed(self, mixed: MixedRows, *, needs_all_rows: bool) -> ForwardBatch:
        sent = SentRows.read(self._ring.upload(mixed.list_sent()))
        self._sampled_places = sent.sampled_rows
        new_lens, max_seq_len = mixed.new_lens, int(mixed.seq_lens.max())
        newest = self.last_tokens[sent.token_rows]
        return ForwardBatch(
            input_ids=torch.where(sent.token_ids == UNKNOWN_TOKEN, newest, sent.token_ids),
            positions=sent.positions,
            cu_query_lens=sent.bounds.to(torch.int32),
            seq_lens=sent.seq_lens.to(torch.int32),
            logits_rows=sent.logits_rows,
            groups=tuple(
                table.gather_device(sent.rows, sent.token_rows, sent.positions, max_seq_len)
                for table in self._device_tables
            ),
            max_query_len=int(new_lens.max()),
            max_seq_len=max_seq_len,
            num_decode_rows=mixed.num_decode_rows,
            new_lens_cpu=tuple(new_lens.tolist()),
            computed_lens_cpu=tuple(mixed.computed_lens.tolist()),
            computed_lens=sent.computed_lens.to(torch.int32),
            kept_rows=None if needs_all_rows else sent.logits_rows,
        )

    def _send_changes(self) -> None:
        """Bring the device's tables up to date."""
        changes = [table.take_changes() for table in self._device_tables]
        arrays = [array for change in changes if change is not None for array in change]
        if not arrays:
            return
        sent = iter(self._ring.upload(arrays))
        for table, change in zip(self._device_tables, changes, strict=True):
            if change is not None:
                table.apply_changes(next(sent), next(sent))

    def _pad_rows(self, num_rows: int) -> int:
        """Return the smallest size that holds `num_rows`; without sizes, so many."""
        place = bisect_left(self._decode_sizes, num_rows)
        return self._decode_sizes[place] if place < len(self._decode_sizes) else num_rows

    def _make_decode_buffers(self, num_rows: int) -> DecodeBuffers:
        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        offsets, slots = [], []
        for table in self._device_tables:
            num_blocks = table.count_blocks(self._max_model_len)
            offsets.append(empty(num_rows, num_blocks, dtype=torch.int32))
            num_slots = 0 if table.geometry.is_per_sequence else num_rows
            slots.append(empty(num_slots, 2, dtype=torch.int32))
        return DecodeBuffers(
            columns=empty(num_rows, _NUM_COLUMNS),
            input_ids=empty(num_rows),
            positions=empty(num_rows),
            seq_lens=empty(num_rows, dtype=torch.int32),
            cu_query_lens=torch.arange(num_rows + 1, dtype=torch.int32, device=self._device),
            logits_rows=torch.arange(num_rows, dtype=torch.int64, device=self._device),
            block_offsets=tuple(offsets),
            slots=tuple(slots),
        )
