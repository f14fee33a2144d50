"""The tensors of padded steps with prompts, at addresses that never change.

Owned by the GPU input batch. The host sends one array a step; `prepare` makes of it what the model
reads, on the device and inside CUDA graphs too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm.batch import ForwardBatch, GroupBatch
from vllm.worker.device_table import DeviceBlockTable
from vllm.worker.mixed_rows import SentRows, count_sent
from vllm.worker.prompt_size import PromptSize


class PromptBuffers:
    """The tensors of all sizes.

    Args:
        sizes: that there are.
        tables: of the KV cache groups.
        max_model_len: longest row.
        device: where they are.

    Attributes:
        sent: int64, where the host's array goes.
    """

    def __init__(
        self,
        sizes: Sequence[PromptSize],
        tables: Sequence[DeviceBlockTable],
        max_model_len: int,
        device: torch.device,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_tokens = max((size.num_tokens for size in sizes), default=0)
        num_rows = max((size.num_rows for size in sizes), default=0)
        self._tables = tuple(tables)
        self._max_model_len = max_model_len
        self.sent = zeros(max(map(count_sent, sizes), default=0), dtype=torch.int64)
        self._input_ids = zeros(num_tokens, dtype=torch.int64)
        self._bounds = zeros(num_rows + 1)
        self._seq_lens = zeros(num_rows)
        self._computed_lens = zeros(num_rows)
        self._groups = [
            GroupBatch(
                block_offsets=zeros(num_rows, table.count_blocks(max_model_len)),
                slots=zeros(0 if table.geometry.is_per_sequence else num_tokens, 2),
                block_tokens=table.geometry.block_tokens,
            )
            for table in self._tables
        ]

    def view(self, size: PromptSize) -> ForwardBatch:
        """Return the tensors of a step; of its rows the host says only how long they can be.

        As many tokens are kept as there are rows, those that are sampled first.
        """
        num_tokens, num_rows = size.num_tokens, size.num_rows
        sent = SentRows.split(self.sent, size)
        return ForwardBatch(
            input_ids=self._input_ids[:num_tokens],
            positions=sent.positions,
            cu_query_lens=self._bounds[: num_rows + 1],
            seq_lens=self._seq_lens[:num_rows],
            computed_lens=self._computed_lens[:num_rows],
            logits_rows=sent.logits_rows,
            groups=tuple(
                GroupBatch(
                    block_offsets=group.block_offsets[:num_rows],
                    slots=group.slots[:num_tokens],
                    block_tokens=group.block_tokens,
                )
                for group in self._groups
            ),
            max_query_len=size.num_prompt_tokens,
            max_seq_len=self._max_model_len,
            num_decode_rows=size.num_decode_rows,
            kept_rows=sent.logits_rows,
            has_spare_tokens=True,
        )

    def prepare(self, size: PromptSize, last_tokens: Tensor) -> None:
        """Fill the tensors of `view` from what was sent.

        Args:
            size: of the step that was sent.
            last_tokens: int64 [rows], the newest token of every persistent row.
        """
        sent, batch = SentRows.split(self.sent, size), self.view(size)
        newest = last_tokens[sent.token_rows]
        torch.where(sent.token_ids < 0, newest, sent.token_ids, out=batch.input_ids)
        batch.cu_query_lens.copy_(sent.bounds)
        batch.seq_lens.copy_(sent.seq_lens)
        assert batch.computed_lens is not None
        batch.computed_lens.copy_(sent.computed_lens)
        for table, group in zip(self._tables, batch.groups, strict=True):
            found = table.gather_device(
                sent.rows, sent.token_rows, sent.positions, self._max_model_len
            )
            group.block_offsets.copy_(found.block_offsets)
            group.slots.copy_(found.slots)
