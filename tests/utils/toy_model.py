"""A model small enough to reason about, and a driver that makes StepPlans without a scheduler.

Used by tests of the worker. The model is made of real `Attention` layers; `reference_logits`
computes the same function densely, with no cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vllm.attention.backends.torch_sdpa import attend_row
from vllm.attention.layer import Attention
from vllm.batch import AttentionState, ForwardBatch
from vllm.cache_spec import CacheLayout, Full, GroupLayout, LayerCacheSpec
from vllm.distributed.parallel_state import TensorParallel
from vllm.step import NewRow, PlanRow, RowOutput, RowSampling, StepPlan
from vllm.types import DType
from vllm.worker.cache_engine import CacheEngine
from vllm.worker.model_runner import ModelRunner

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 32
HIDDEN = HEADS * HEAD_SIZE
BLOCK_TOKENS = 4
GREEDY = RowSampling(temperature=0.0)


class ToyModel(nn.Module):
    """Embedding with positions, attention layers with residuals, output matrix."""

    def __init__(self, vocab: int = 61, windows: Sequence[int] = (0, 5), seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def matrix(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

        self.embedding = matrix(vocab, HIDDEN) * HIDDEN**0.5
        self.place = matrix(512, HIDDEN) * HIDDEN**0.5
        self.q = [matrix(HIDDEN, HIDDEN) for _ in windows]
        self.k = [matrix(KV_HEADS * HEAD_SIZE, HIDDEN) for _ in windows]
        self.v = [matrix(KV_HEADS * HEAD_SIZE, HIDDEN) for _ in windows]
        self.head = matrix(vocab, HIDDEN)
        self.layers = nn.ModuleList(
            Attention(
                i,
                HEADS,
                KV_HEADS,
                HEAD_SIZE,
                HEAD_SIZE**-0.5,
                Full(),
                dtype=DType.FLOAT32,
                window=window,
            )
            for i, window in enumerate(windows)
        )

    def cache_specs(self) -> tuple[LayerCacheSpec, ...]:
        """See TextModel."""
        return tuple(layer.spec for layer in self.layers)

    def attention_layers(self) -> Mapping[int, Attention]:
        """See TextModel."""
        return dict(enumerate(self.layers))

    def forward(self, batch: ForwardBatch, attention: AttentionState) -> Tensor:
        """See TextModel."""
        hidden = self.embedding[batch.input_ids] + self.place[batch.positions]
        for i, layer in enumerate(self.layers):
            q, k, v = self._project(hidden, i)
            hidden = hidden + layer(q, k, v, batch, attention).flatten(1)
        return hidden

    def compute_logits(self, hidden_LE: Tensor) -> Tensor:
        """See TextModel."""
        return hidden_LE @ self.head.T

    def _project(self, hidden: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = (len(hidden), -1, HEAD_SIZE)
        q, k, v = (hidden @ m[layer].T for m in (self.q, self.k, self.v))
        return q.view(shape), k.view(shape), v.view(shape)

    def reference_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return logits [T, vocab] of a whole sequence, computed densely."""
        ids = torch.tensor(token_ids)
        hidden = self.embedding[ids] + self.place[: len(ids)]
        for i, layer in enumerate(self.layers):
            q, k, v = self._project(hidden, i)
            hidden = hidden + attend_row(q, k, v, layer.params).flatten(1)
        return self.compute_logits(hidden)

    def reference_greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the greedy continuation of a prompt."""
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(self.reference_logits(ids)[-1].argmax()))
        return ids[len(prompt) :]


@dataclass
class ToySequence:
    """What the driver knows of a sequence."""

    seq_id: int
    tokens: list[int]
    num_prompt_tokens: int
    sampling: RowSampling
    processors: tuple = ()
    branch: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    outputs: list[RowOutput] = field(default_factory=list)

    @property
    def output_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.num_prompt_tokens :]


class ToyDriver:
    """Stands in for the scheduler: one group, blocks handed out from a shuffled list."""

    def __init__(
        self, model: ToyModel, kernel: str = "cpu", num_blocks: int = 200, max_num_seqs: int = 4
    ) -> None:
        layers = tuple(range(len(model.layers)))
        for layer in model.layers:
            layer.bind(kernel)
        group = GroupLayout(
            name="full", layers=layers, block_tokens=BLOCK_TOKENS, blocks_per_superblock=3
        )
        layout = CacheLayout(groups=(group,), num_superblocks=-(-num_blocks // 3))
        self.cache = CacheEngine(model.cache_specs(), layout, torch.device("cpu"))
        self.runner = ModelRunner(
            model,
            self.cache,
            dict.fromkeys(layers, kernel),
            TensorParallel.single(),
            max_num_seqs=max_num_seqs,
            max_model_len=256,
            device=torch.device("cpu"),
        )
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7))
        self.free = order.tolist()
        self._entering: list[ToySequence] = []
        self._dropped: list[int] = []
        self._step = 0
        self._next_id = 0

    def add(
        self, prompt: Sequence[int], sampling: RowSampling = GREEDY, **fields: object
    ) -> ToySequence:
        """Enter a sequence."""
        self._next_id += 1
        seq = ToySequence(self._next_id, list(prompt), len(prompt), sampling, **fields)
        self._entering.append(seq)
        return seq

    def preempt(self, seq: ToySequence) -> None:
        """Take a sequence out and let it enter again with nothing computed."""
        self._dropped.append(seq.seq_id)
        self.free.extend(seq.blocks)
        seq.blocks, seq.computed = [], 0
        self._entering.append(seq)

    def step(
        self,
        counts: Mapping[int, int] | Sequence[tuple[ToySequence, int]],
        masks: Mapping[int, bytes] | None = None,
        num_samples: int = 1,
    ) -> list[RowOutput]:
        """Compute so many tokens of each sequence; samples where that reaches its last token."""
        new_rows, rows = [], []
        for seq, count in counts:
            needed = -(-(seq.computed + count) // BLOCK_TOKENS) - len(seq.blocks)
            fresh = [self.free.pop() for _ in range(needed)]
            seq.blocks.extend(fresh)
            if seq in self._entering:
                self._entering.remove(seq)
                new_rows.append(self._make_row(seq))
                fresh = []
            reaches_end = seq.computed + count == len(seq.tokens)
            rows.append(
                PlanRow(
                    seq_id=seq.seq_id,
                    num_computed_tokens=seq.computed,
                    num_new_tokens=count,
                    new_block_ids=(fresh,),
                    num_samples=num_samples if reaches_end else 0,
                )
            )
        plan = StepPlan(
            step=self._step,
            dropped=self._dropped,
            new_rows=new_rows,
            rows=rows,
            token_masks=dict(masks or {}),
        )
        self._step += 1
        self._dropped = []
        output = self.runner.execute(plan)
        for (seq, count), row in zip(counts, output.rows, strict=True):
            assert row.seq_id == seq.seq_id
            seq.computed += count
            seq.outputs.append(row)
            seq.tokens.extend(row.token_ids[:1])
        return output.rows

    def run(self, sequences: Sequence[ToySequence], num_tokens: int, chunk: int = 1000) -> None:
        """Step all sequences together until each has `num_tokens` outputs."""
        while work := [s for s in sequences if len(s.output_ids) < num_tokens]:
            self.step([(s, min(chunk, len(s.tokens) - s.computed)) for s in work])

    def _make_row(self, seq: ToySequence) -> NewRow:
        return NewRow(
            seq_id=seq.seq_id,
            branch=seq.branch,
            token_ids=list(seq.tokens),
            num_prompt_tokens=seq.num_prompt_tokens,
            num_computed_tokens=seq.computed,
            block_ids=(list(seq.blocks),),
            sampling=seq.sampling,
            logits_processors=seq.processors,
        )
