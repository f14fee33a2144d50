"""The embedding and the output matrix, rows split over tensor-parallel ranks.

Built by `models/causal_lm.py`. The vocabulary is padded so that every rank holds as many rows;
padded rows are zero, never looked up, and cut from the logits by the LogitsProcessor.

Shapes: T tokens, E hidden size, V rows of this rank.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm._custom_ops import linear as linear_ops
from vllm.cache_spec import align_up
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.layers.weight_place import Shard, WeightPlace

VOCAB_PADDING = 64


class VocabMatrix(Linear):
    """A matrix with a row for each token id, [vocab_size, hidden_size] over all ranks.

    Attributes:
        vocab_size: rows of the checkpoint, without padding.
        first_row: id of this rank's first row.
        num_rows: how many of this rank's rows are real; the rest is padding.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, tp: TensorParallel
    ) -> None:
        rows = align_up(vocab_size, math.lcm(VOCAB_PADDING, tp.size)) // tp.size
        super().__init__(hidden_size, rows, bias=False, dtype=dtype)
        self.vocab_size = vocab_size
        self.first_row = min(tp.rank * rows, vocab_size)
        self.num_rows = min(rows, vocab_size - self.first_row)
        self._tp = tp
        self.parameter("weight")[self.num_rows :].zero_()

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; there is one shard, None."""
        return WeightPlace(
            shape=(self.vocab_size, self.input_size),
            target=self.parameter(field)[: self.num_rows],
            axis=0,
            start=self.first_row,
        )


class VocabParallelEmbedding(VocabMatrix):
    """Rows by token id; once packed it serves as a tied output matrix from the same storage."""

    def forward(self, ids_T: Tensor) -> Tensor:
        """Return the rows of `ids`, [T, E], on every rank."""
        return self._tp.all_reduce(self.look_up(ids_T))

    def look_up(self, ids_T: Tensor) -> Tensor:
        """Return the rows that this rank holds and zeros for the others, [T, E]."""
        if self._tp.size == 1:
            return self._gather(ids_T)
        local_T = ids_T - self.first_row
        is_here_T = (local_T >= 0) & (local_T < self.num_rows)
        rows_TE = self._gather(torch.where(is_here_T, local_T, 0))
        return torch.where(is_here_T[:, None], rows_TE, 0.0)

    def _gather(self, ids_T: Tensor) -> Tensor:
        if self.packed is None:
            assert self.weight is not None
            return F.embedding(ids_T, self.weight)
        out_TE = torch.empty(
            ids_T.shape[0], self.input_size, dtype=self.packed.dtype, device=ids_T.device
        )
        linear_ops.embedding(out_TE, ids_T, self.packed)
        return out_TE


class ParallelLMHead(VocabMatrix):
    """Hidden states to this rank's columns of the logits."""
