"""Penalties, grammar masks and log-probabilities against their twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.utils.ops import assert_rows_stand_alone, random_rows
from vllm._custom_ops import sampling
from vllm._custom_ops.naive import sampling as naive
from vllm.errors import ShapeError

INF = float("inf")


def make_penalties(rows: int, vocab: int) -> tuple[Tensor, ...]:
    """Token lists of different lengths, some empty; every kind of penalty on some row."""
    g = torch.Generator().manual_seed(rows)
    sizes = torch.randint(0, min(vocab, 40), (rows,), generator=g)
    sizes[0] = 0
    cu_tokens = torch.cat((torch.zeros(1).long(), sizes.cumsum(0)))
    ids = [torch.randperm(vocab, generator=g)[:size] for size in sizes.tolist()]
    counts = torch.randint(0, 4, (int(sizes.sum()),), generator=g, dtype=torch.int32)
    return (
        cu_tokens,
        torch.cat(ids),
        counts,
        torch.rand(rows, generator=g) + 0.5,
        torch.rand(rows, generator=g) * 2 - 1,
        torch.rand(rows, generator=g) * 2 - 1,
    )


@pytest.mark.parametrize("vocab", [3, 64, 5000])
def test_penalties_equal_twin(isa: str, vocab: int) -> None:
    logits = random_rows(9, vocab, dtype=torch.float32, seed=1, scale=3.0)
    logits[:, 0] = -INF
    expected = logits.clone()
    arguments = make_penalties(9, vocab)
    sampling.apply_penalties(logits, *arguments)
    naive.apply_penalties(expected, *arguments)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_penalties_touch_only_their_row_and_tokens() -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0, 0.5], [1.0, -1.0, 2.0, 0.5]])
    sampling.apply_penalties(
        logits,
        torch.tensor([0, 0, 3]),
        torch.tensor([0, 1, 2]),
        torch.tensor([0, 1, 3], dtype=torch.int32),
        torch.tensor([9.0, 2.0]),
        torch.tensor([9.0, 0.25]),
        torch.tensor([9.0, 0.5]),
    )
    assert logits[0].tolist() == [1.0, -1.0, 2.0, 0.5]
    # Prompt only: repetition. Once: -2 - 0.25 - 0.5. Three times: 1 - 0.75 - 0.5.
    assert logits[1].tolist() == [0.5, -2.75, -0.25, 0.5]


@pytest.mark.parametrize(
    "vocab, words", [(1, 1), (32, 1), (70, 3), (5000, 157), (5000, 20), (40, 9)]
)
def test_bitmask_equals_twin(isa: str, vocab: int, words: int) -> None:
    g = torch.Generator().manual_seed(vocab)
    logits = random_rows(6, vocab, dtype=torch.float32, seed=2)
    rows = torch.tensor([4, 0, 5])
    bitmask = torch.randint(-(2**31), 2**31 - 1, (3, words), generator=g).int()
    bitmask[1] = -1
    expected = logits.clone()
    sampling.apply_token_bitmask(logits, rows, bitmask)
    naive.apply_token_bitmask(expected, rows, bitmask)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    "vocab, k", [(1, 1), (5, 5), (300, 0), (300, 20), (20000, 20), (3000, 2999)]
)
@pytest.mark.parametrize("scale", [0.0, 3.0, 60.0])
def test_logprobs_equal_twin(isa: str, vocab: int, k: int, scale: float) -> None:
    logits = random_rows(6, vocab, dtype=torch.float32, seed=3, scale=scale)
    logits[1, vocab // 3 :] = -INF
    logits[2] = logits[2].round()
    logits[3, ::2] = float("nan")
    chosen = torch.arange(6) * 7 % vocab
    actual = [
        torch.full((6, 1 + k), float("nan")),
        torch.full((6, 1 + k), -1),
        torch.full((6,), -1),
    ]
    expected = [t.clone() for t in actual]
    sampling.topk_logprobs(*actual, logits, chosen)
    naive.topk_logprobs(*expected, logits, chosen)
    assert torch.equal(actual[1], expected[1])
    assert torch.equal(actual[2], expected[2])
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-6, atol=2e-6)


def test_rank_counts_strictly_more_likely_tokens() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 3.0]]).expand(4, -1)
    logprobs, ids, ranks = torch.zeros(4, 3), torch.zeros(4, 3).long(), torch.zeros(4).long()
    sampling.topk_logprobs(logprobs, ids, ranks, logits, torch.arange(4))
    assert ranks.tolist() == [4, 2, 2, 1]
    assert ids[0].tolist() == [0, 3, 1]


def test_a_row_without_any_token() -> None:
    logits = torch.full((1, 9), -INF)
    logprobs, ids, ranks = torch.zeros(1, 4), torch.zeros(1, 4).long(), torch.zeros(1).long()
    sampling.topk_logprobs(logprobs, ids, ranks, logits, torch.tensor([5]))
    assert logprobs.tolist() == [[-INF] * 4]
    assert ids.tolist() == [[5, 0, 1, 2]]
    assert ranks.tolist() == [1]


def test_rows_stand_alone(isa: str) -> None:
    logits = random_rows(10, 150_000, dtype=torch.float32, seed=4)
    chosen = torch.arange(10) * 11

    def run(rows: list[int]) -> Tensor:
        size = len(rows)
        out = torch.zeros(size, 9), torch.zeros(size, 9).long(), torch.zeros(size).long()
        sampling.topk_logprobs(*out, logits[rows], chosen[rows])
        return torch.cat((out[0], out[1].float(), out[2][:, None].float()), -1)

    assert_rows_stand_alone(run, 10)


def test_bad_arguments_change_nothing() -> None:
    logits = torch.randn(2, 8)
    before = logits.clone()
    ones = torch.ones(2)
    with pytest.raises(ShapeError, match=r"token_ids\[1\] is 8, allowed: 0 to 7"):
        sampling.apply_penalties(
            logits, torch.tensor([0, 2, 2]), torch.tensor([1, 8]), torch.ones(2).int(), *[ones] * 3
        )
    with pytest.raises(
        ShapeError, match="cu_tokens must rise from 0 to at most 1, row 1 has 1 and 5"
    ):
        sampling.apply_penalties(
            logits, torch.tensor([0, 1, 5]), torch.tensor([1]), torch.ones(1).int(), *[ones] * 3
        )
    with pytest.raises(ShapeError, match=r"rows\[0\] is 2, allowed: 0 to 1"):
        sampling.apply_token_bitmask(logits, torch.tensor([2]), torch.zeros(1, 1).int())
    with pytest.raises(ShapeError, match="bitmask is Long, expected Int"):
        sampling.apply_token_bitmask(logits, torch.tensor([1]), torch.zeros(1, 1).long())
    out = torch.zeros(2, 3), torch.zeros(2, 3).long(), torch.zeros(2).long()
    with pytest.raises(ShapeError, match=r"chosen_ids\[1\] is -1"):
        sampling.topk_logprobs(*out, logits, torch.tensor([0, -1]))
    with pytest.raises(ShapeError, match="last size must be 1 to 9"):
        sampling.topk_logprobs(
            torch.zeros(2, 11), torch.zeros(2, 11).long(), out[2], logits, out[2]
        )
    assert torch.equal(logits, before)
