"""Runs a model over a paged cache without an engine: prefill whole or in chunks, decode, batches.

Used by tests of models and layers. One group of blocks for each lifetime; blocks are handed out in
a shuffled order and the cache starts as NaN, so that a wrong address or a row read before it is
written shows.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm.attention.backends.paged_attn import PagedAttention
from vllm.batch import AttentionState, ForwardBatch, GroupBatch, LayerCache
from vllm.cache_spec import (
    BLOCK_ALIGNMENT_BYTES,
    KVCacheGroup,
    LayerCacheSpec,
    Lifetime,
    State,
    make_group,
)
from vllm.model_executor.models.interfaces import TextModel
from vllm.utils.tensors import view_cache_field

_NAN_BYTE = 0xFF


class _GroupCache:
    """The blocks of the layers of one lifetime, one arena of their own."""

    def __init__(self, group: KVCacheGroup, num_blocks: int, seed: int) -> None:
        self.group = group
        self.is_state = isinstance(group.lifetime, State)
        self.units = group.block_bytes // BLOCK_ALIGNMENT_BYTES
        self.pad = num_blocks * self.units
        size = (num_blocks + 1) * group.block_bytes
        self.arena = torch.full((size,), _NAN_BYTE, dtype=torch.uint8)
        self.free_blocks = list(range(num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.views: dict[int, list[Tensor]] = {}
        for place in group.places:
            view = view_cache_field(
                self.arena, place.field, place.offset_bytes, group.block_bytes, group.block_tokens
            )
            self.views.setdefault(place.layer, []).append(view)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of this length needs."""
        return 1 if self.is_state else -(-num_tokens // self.group.block_tokens)

    def poison(self, block: int) -> None:
        """Fill a block with NaN."""
        begin = block * self.group.block_bytes
        self.arena[begin : begin + self.group.block_bytes] = _NAN_BYTE


@dataclass
class _Sequence:
    blocks: list[list[int]]
    num_computed: int = 0


class PagedDriver:
    """A paged cache and the batches over it.

    Args:
        model: loaded and finished.
        num_blocks: blocks of each group's cache, one more is added as pad block.
        kernel: attention kernel of every layer.
        poison_freed: fill the blocks of a sequence with NaN when it is freed.
    """

    def __init__(
        self,
        model: TextModel,
        *,
        num_blocks: int = 160,
        block_tokens: int = 16,
        kernel: str = "torch",
        seed: int = 0,
        poison_freed: bool = False,
    ) -> None:
        self.model = model
        self.kernel = kernel
        self._poison_freed = poison_freed
        specs = model.cache_specs()
        by_lifetime: dict[Lifetime, list[LayerCacheSpec]] = {}
        for spec in specs:
            if spec.reads_from is None and spec.fields:
                by_lifetime.setdefault(spec.lifetime, []).append(spec)
        self._groups = [
            _GroupCache(make_group(f"group{index}", owners, block_tokens), num_blocks, seed + index)
            for index, owners in enumerate(by_lifetime.values())
        ]
        for layer in model.attention_layers().values():
            layer.bind(kernel)
        caches: list[LayerCache | None] = []
        for spec in specs:
            owner = spec.layer if spec.reads_from is None else spec.reads_from
            held = [(i, g.views[owner]) for i, g in enumerate(self._groups) if owner in g.views]
            caches.append(LayerCache(group=held[0][0], tensors=tuple(held[0][1])) if held else None)
        self.caches = tuple(caches)
        self._sequences: dict[int, _Sequence] = {}

    def free(self, sequence: int) -> None:
        """Give the blocks of a sequence back; they keep their content unless it is poisoned."""
        for group, blocks in zip(self._groups, self._sequences.pop(sequence).blocks, strict=True):
            if self._poison_freed:
                for block in blocks:
                    group.poison(block)
            group.free_blocks += blocks

    @torch.inference_mode()
    def step(
        self,
        rows: Mapping[int, Sequence[int]],
        *,
        all_logits: bool = False,
        keeps_rows: bool = False,
    ) -> list[Tensor]:
        """Process the next tokens of some sequences in one batch.

        Args:
            rows: sequence number -> its next token ids; a new number starts a sequence.
            all_logits: return logits of every new token instead of the last one.
            keeps_rows: have the model leave out what the logits do not need.

        Returns:
            For each row float32 logits, [vocab] or [new tokens, vocab].
        """
        batch = self._make_batch(rows, all_logits)
        if keeps_rows:
            batch = replace(batch, kept_rows=batch.logits_rows)
        attended = [i for i, group in enumerate(self._groups) if not group.is_state]
        plans = PagedAttention.plan(batch, [(index, self.kernel) for index in attended])
        attention = AttentionState(caches=self.caches, plans=plans)
        hidden = self.model.forward(batch, attention)
        logits = self.model.compute_logits(hidden if keeps_rows else hidden[batch.logits_rows])
        for number, tokens in rows.items():
            self._sequences[number].num_computed += len(tokens)
        if not all_logits:
            return list(logits)
        return list(logits.split([len(tokens) for tokens in rows.values()]))

    def _make_batch(self, rows: Mapping[int, Sequence[int]], all_logits: bool) -> ForwardBatch:
        positions: list[int] = []
        seq_lens: list[int] = []
        starts = [self._sequences[n].num_computed if n in self._sequences else 0 for n in rows]
        for start, (number, tokens) in zip(starts, rows.items(), strict=True):
            sequence = self._sequences.setdefault(number, _Sequence([[] for _ in self._groups]))
            end = start + len(tokens)
            for group, blocks in zip(self._groups, sequence.blocks, strict=True):
                while len(blocks) < group.blocks_for(end):
                    blocks.append(group.free_blocks.pop())
            positions += range(start, end)
            seq_lens.append(end)
        query_lens = [len(tokens) for tokens in rows.values()]
        cu_query_lens = [0]
        for length in query_lens:
            cu_query_lens.append(cu_query_lens[-1] + length)
        num_decode_rows = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
        last_rows = [end - 1 for end in cu_query_lens[1:]]
        return ForwardBatch(
            input_ids=torch.tensor([t for tokens in rows.values() for t in tokens]),
            positions=torch.tensor(positions),
            cu_query_lens=torch.tensor(cu_query_lens, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            logits_rows=torch.arange(len(positions)) if all_logits else torch.tensor(last_rows),
            groups=tuple(
                self._make_group_batch(index, list(rows), starts, seq_lens)
                for index in range(len(self._groups))
            ),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            num_decode_rows=num_decode_rows,
            new_lens_cpu=tuple(query_lens),
            computed_lens_cpu=tuple(starts),
        )

    def _make_group_batch(
        self, index: int, numbers: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> GroupBatch:
        group = self._groups[index]
        tables = [self._sequences[number].blocks[index] for number in numbers]
        width = max(len(blocks) for blocks in tables)
        block_offsets = torch.full((len(tables), width), group.pad, dtype=torch.int32)
        slots: list[tuple[int, int]] = []
        for row, blocks in enumerate(tables):
            block_offsets[row, : len(blocks)] = (
                torch.tensor(blocks, dtype=torch.int32) * group.units
            )
            if group.is_state:
                continue
            for position in range(starts[row], ends[row]):
                block, line = divmod(position, group.group.block_tokens)
                slots.append((blocks[block] * group.units, line))
        return GroupBatch(
            block_offsets=block_offsets,
            slots=torch.tensor(slots, dtype=torch.int32).reshape(-1, 2),
            block_tokens=group.group.block_tokens,
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
