"""Runs a model over a paged cache without an engine: prefill whole or in chunks, decode, batches.

Used by tests of models and layers. One group of blocks; blocks are handed out in a shuffled order
and the cache starts as NaN, so that a wrong address or a row read before it is written shows.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm.attention.backends.paged_attn import PagedAttention
from vllm.batch import AttentionState, ForwardBatch, GroupBatch, LayerCache
from vllm.cache_spec import BLOCK_ALIGNMENT_BYTES, KVCacheGroup, make_group
from vllm.model_executor.models.interfaces import TextModel
from vllm.utils.tensors import view_cache_field

_NAN_BYTE = 0xFF


@dataclass
class _Sequence:
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0


class PagedDriver:
    """A paged cache and the batches over it.

    Args:
        model: loaded and finished.
        num_blocks: blocks of the cache, one more is added as pad block.
        kernel: attention kernel of every layer.
    """

    def __init__(
        self,
        model: TextModel,
        *,
        num_blocks: int = 160,
        block_tokens: int = 16,
        kernel: str = "torch",
        seed: int = 0,
    ) -> None:
        self.model = model
        self.kernel = kernel
        specs = model.cache_specs()
        owners = [spec for spec in specs if spec.reads_from is None and spec.fields]
        self.group: KVCacheGroup = make_group("full", owners, block_tokens)
        for layer in model.attention_layers().values():
            layer.bind(kernel)
        self._units = self.group.block_bytes // BLOCK_ALIGNMENT_BYTES
        self._pad = num_blocks * self._units
        self.arena = torch.full(
            ((num_blocks + 1) * self.group.block_bytes,), _NAN_BYTE, dtype=torch.uint8
        )
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        views: dict[int, list[Tensor]] = {}
        for place in self.group.places:
            view = view_cache_field(
                self.arena,
                place.field,
                place.offset_bytes,
                self.group.block_bytes,
                block_tokens,
            )
            views.setdefault(place.layer, []).append(view)
        self.caches = tuple(LayerCache(group=0, tensors=tuple(views[spec.layer])) for spec in specs)
        self._sequences: dict[int, _Sequence] = {}

    def free(self, sequence: int) -> None:
        """Give the blocks of a sequence back; they keep their content."""
        self._free += self._sequences.pop(sequence).blocks

    @torch.inference_mode()
    def step(self, rows: Mapping[int, Sequence[int]], *, all_logits: bool = False) -> list[Tensor]:
        """Process the next tokens of some sequences in one batch.

        Args:
            rows: sequence number -> its next token ids; a new number starts a sequence.
            all_logits: return logits of every new token instead of the last one.

        Returns:
            For each row float32 logits, [vocab] or [new tokens, vocab].
        """
        batch = self._make_batch(rows, all_logits)
        plans = PagedAttention.plan(batch, [(0, self.kernel)])
        attention = AttentionState(caches=self.caches, plans=plans)
        hidden = self.model.forward(batch, attention)
        logits = self.model.compute_logits(hidden[batch.logits_rows])
        for number, tokens in rows.items():
            self._sequences[number].num_computed += len(tokens)
        if not all_logits:
            return list(logits)
        return list(logits.split([len(tokens) for tokens in rows.values()]))

    def _make_batch(self, rows: Mapping[int, Sequence[int]], all_logits: bool) -> ForwardBatch:
        positions: list[int] = []
        slots: list[tuple[int, int]] = []
        seq_lens: list[int] = []
        for number, tokens in rows.items():
            sequence = self._sequences.setdefault(number, _Sequence())
            end = sequence.num_computed + len(tokens)
            while len(sequence.blocks) * self.group.block_tokens < end:
                sequence.blocks.append(self._free.pop())
            for position in range(sequence.num_computed, end):
                block, row = divmod(position, self.group.block_tokens)
                positions.append(position)
                slots.append((sequence.blocks[block] * self._units, row))
            seq_lens.append(end)
        query_lens = [len(tokens) for tokens in rows.values()]
        cu_query_lens = [0]
        for length in query_lens:
            cu_query_lens.append(cu_query_lens[-1] + length)
        width = max(len(self._sequences[number].blocks) for number in rows)
        block_offsets = torch.full((len(rows), width), self._pad, dtype=torch.int32)
        for index, number in enumerate(rows):
            blocks = torch.tensor(self._sequences[number].blocks, dtype=torch.int32)
            block_offsets[index, : len(blocks)] = blocks * self._units
        num_decode_rows = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
        last_rows = [end - 1 for end in cu_query_lens[1:]]
        return ForwardBatch(
            input_ids=torch.tensor([t for tokens in rows.values() for t in tokens]),
            positions=torch.tensor(positions),
            cu_query_lens=torch.tensor(cu_query_lens, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            logits_rows=torch.arange(len(positions)) if all_logits else torch.tensor(last_rows),
            groups=(
                GroupBatch(
                    block_offsets=block_offsets,
                    slots=torch.tensor(slots, dtype=torch.int32),
                    block_tokens=self.group.block_tokens,
                ),
            ),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            num_decode_rows=num_decode_rows,
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk_tokens: int = 1 << 30
    ) -> list[Generated]:
        """Continue all prompts greedily in one batch, prompts in chunks.

        Args:
            chunk_tokens: most prompt tokens of one sequence in one step.
        """
        pending = {number: list(prompt) for number, prompt in enumerate(prompts)}
        made = {number: Generated(token_ids=[], logits=[]) for number in pending}
        while pending:
            rows = {number: tokens[:chunk_tokens] for number, tokens in pending.items()}
            for number, logits in zip(rows, self.step(rows), strict=True):
                rest = pending[number][len(rows[number]) :]
                if rest:
                    pending[number] = rest
                    continue
                token = int(logits.argmax())
                made[number].token_ids.append(token)
                made[number].logits.append(logits)
                if len(made[number].token_ids) == num_tokens:
                    del pending[number]
                    self.free(number)
                else:
                    pending[number] = [token]
        return list(made.values())


@dataclass
class Generated:
    """Tokens made for one prompt and the logits that each was taken from."""

    token_ids: list[int]
    logits: list[Tensor]
