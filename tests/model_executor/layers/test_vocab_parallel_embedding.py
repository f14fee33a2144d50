"""Case C37: a vocabulary that needs padding, split over ranks, all ranks in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model_executor.layers.test_linear import make_rank
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabMatrix,
    VocabParallelEmbedding,
)

VOCAB, HIDDEN = 330, 48


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def make_shards(kind: type[VocabMatrix], size: int, weight: Tensor) -> list[VocabMatrix]:
    shards = []
    for rank in range(size):
        shard = kind(VOCAB, HIDDEN, dtype=weight.dtype, tp=make_rank(rank, size))
        place = shard.place("weight", None)
        assert place.shape == (VOCAB, HIDDEN)
        place.write(weight)
        shards.append(shard)
    return shards


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_ranks_hold_equal_shares_that_cover_the_vocabulary_once(size: int) -> None:
    shards = make_shards(ParallelLMHead, size, random(VOCAB, HIDDEN))
    assert len({shard.output_size for shard in shards}) == 1
    assert size * shards[0].output_size % 64 == 0
    assert sum(shard.num_rows for shard in shards) == VOCAB
    ends = [shard.first_row + shard.num_rows for shard in shards]
    assert [shard.first_row for shard in shards[1:]] == ends[:-1]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_c37_joined_logits_equal_one_rank(size: int, is_packed: bool) -> None:
    weight, hidden = random(VOCAB, HIDDEN), random(1000, HIDDEN)
    shards = make_shards(ParallelLMHead, size, weight)
    if is_packed:
        for shard in shards:
            shard.pack()
    joined = torch.cat([shard.multiply(hidden, None) for shard in shards], dim=-1)
    assert joined.shape[1] >= VOCAB and torch.equal(
        joined[:, VOCAB:], torch.zeros_like(joined[:, VOCAB:])
    )
    torch.testing.assert_close(joined[:, :VOCAB], hidden @ weight.T, rtol=0, atol=1e-4)


def test_c37_padding_never_wins() -> None:
    """All real logits are negative, so that a padded column's zero would win."""
    weight = -random(VOCAB, HIDDEN).abs()
    (head,) = make_shards(ParallelLMHead, 1, weight)
    head.pack()
    processor = LogitsProcessor(VOCAB, tp=TensorParallel.single())
    logits = processor(head, random(1000, HIDDEN).abs())
    assert logits.shape == (1000, VOCAB) and logits.dtype == torch.float32
    assert logits.max() < 0 and int(logits.argmax(-1).max()) < VOCAB


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_of_all_ranks_added_are_the_embedding(size: int) -> None:
    weight = random(VOCAB, HIDDEN)
    ids = torch.tensor([0, 1, 191, 192, 329, 127, 128, 63, 64])
    total = torch.zeros(len(ids), HIDDEN)
    for shard in make_shards(VocabParallelEmbedding, size, weight):
        assert isinstance(shard, VocabParallelEmbedding)
        total += shard.look_up(ids)
    assert torch.equal(total, weight[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_embedding_is_one_packed_tensor(dtype: torch.dtype) -> None:
    weight = random(VOCAB, HIDDEN).to(dtype)
    (embedding,) = make_shards(VocabParallelEmbedding, 1, weight)
    assert isinstance(embedding, VocabParallelEmbedding)
    embedding.pack()
    assert embedding.weight is None
    ids = torch.tensor([5, 329, 0, 5])
    assert torch.equal(embedding(ids), weight[ids])
    hidden = random(3, HIDDEN).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(
        embedding.multiply(hidden, None)[:, :VOCAB], hidden @ weight.T, rtol=1e-2, atol=tolerance
    )


def test_scale_comes_before_the_cap() -> None:
    weight, hidden = random(VOCAB, HIDDEN), random(4, HIDDEN)
    (head,) = make_shards(ParallelLMHead, 1, weight)
    processor = LogitsProcessor(VOCAB, tp=TensorParallel.single(), scale=0.5, soft_cap=3.0)
    expected = torch.tanh(hidden @ weight.T * 0.5 / 3.0) * 3.0
    torch.testing.assert_close(processor(head, hidden), expected)
