"""Drawing and filtering against the twins, the random stream, ties, extremes, the bit rule."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.utils.ops import assert_rows_stand_alone, random_rows
from vllm._custom_ops import sampling
from vllm._custom_ops.naive import sampling as naive
from vllm.errors import ShapeError

VOCABULARIES = (1, 5, 64, 1000, 4097, 20000)
INF = float("inf")


@dataclass(frozen=True)
class Filters:
    """Arguments of `sample` for a number of rows."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.temperature, self.top_p, self.top_k, self.min_p

    def rows(self, rows: list[int]) -> Filters:
        return Filters(*(t[rows] for t in self.tensors()))


def same(rows: int, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) -> Filters:
    return Filters(
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), min_p),
    )


def mixed(rows: int, vocab: int, seed: int) -> Filters:
    """Every filter alone, all together, and none, over the rows."""
    g = torch.Generator().manual_seed(seed)
    use = torch.randint(0, 2, (4, rows), generator=g).bool()
    return Filters(
        torch.where(use[0], torch.rand(rows, generator=g) * 2 + 0.1, 1.0),
        torch.where(use[1], torch.rand(rows, generator=g) * 0.98 + 0.01, 1.0),
        torch.where(use[2], torch.randint(1, vocab + 1, (rows,), generator=g), 0).int(),
        torch.where(use[3], torch.rand(rows, generator=g) * 0.3, 0.0),
    )


def draw(logits: Tensor, filters: Filters, seeds: Tensor, offsets: Tensor) -> Tensor:
    ids = torch.full((logits.shape[0],), -1)
    sampling.sample(ids, logits, *filters.tensors(), seeds, offsets)
    return ids


@functools.cache
def make_case(vocab: int, scale: float) -> tuple[Tensor, Filters, Tensor, Tensor]:
    """Logits, filters, and what the twins make of them: ids, filtered logits."""
    rows = 24
    logits = random_rows(rows, vocab, dtype=torch.float32, seed=vocab, scale=scale)
    logits[::3, 1::2] = -INF
    filters = mixed(rows, vocab, seed=vocab)
    filters.temperature[::5] = 0.0
    ids, filtered = torch.full((rows,), -1), logits.clone()
    torch.set_num_threads(1)
    naive.sample(ids, logits, *filters.tensors(), *make_streams(rows))
    naive.filter_logits(filtered, *filters.tensors())
    return logits, filters, ids, filtered


def make_streams(rows: int) -> tuple[Tensor, Tensor]:
    return torch.arange(rows) * 7919 - 5, torch.arange(rows) % 3


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("scale", [0.0, 0.1, 4.0, 30.0])
def test_equals_twin(isa: str, vocab: int, scale: float) -> None:
    logits, filters, expected_ids, expected_logits = make_case(vocab, scale)
    filtered = logits.clone()
    assert torch.equal(draw(logits, filters, *make_streams(logits.shape[0])), expected_ids)
    sampling.filter_logits(filtered, *filters.tensors())
    assert torch.equal(filtered == -INF, expected_logits == -INF)
    torch.testing.assert_close(filtered, expected_logits, rtol=1e-6, atol=0)


def test_ties_keep_exactly_k_and_go_to_the_lower_ids() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, 4000] = 1.0
    sampling.filter_logits(logits, *same(1, top_k=300).tensors())
    kept = torch.nonzero(logits[0] > -INF).flatten().tolist()
    assert kept == [*range(299), 4000]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probabilities = torch.tensor([0.05, 0.4, 0.25, 0.2, 0.1])
    for top_p, kept in ((0.3, [1]), (0.41, [1, 2]), (0.66, [1, 2, 3]), (0.96, [0, 1, 2, 3, 4])):
        logits = probabilities.log()[None].clone()
        sampling.filter_logits(logits, *same(1, top_p=top_p).tensors())
        assert torch.nonzero(logits[0] > -INF).flatten().tolist() == kept, top_p
    for top_p in (1e-9, 0.0):
        logits = random_rows(1, 3000, dtype=torch.float32, seed=2)
        best = int(logits.argmax())
        sampling.filter_logits(logits, *same(1, top_p=top_p).tensors())
        assert torch.nonzero(logits[0] > -INF).flatten().tolist() == [best]


def test_top_p_counts_what_top_k_leaves() -> None:
    # After top-k 2 the two best have 8/13 and 5/13, so 0.6 needs one; of all mass it needs two.
    logits = torch.tensor([[0.4, 0.25, 0.2, 0.15]]).log()
    both = logits.clone()
    sampling.filter_logits(both, *same(1, top_p=0.6, top_k=2).tensors())
    assert torch.nonzero(both[0] > -INF).flatten().tolist() == [0]
    alone = logits.clone()
    sampling.filter_logits(alone, *same(1, top_p=0.6).tensors())
    assert torch.nonzero(alone[0] > -INF).flatten().tolist() == [0, 1]


def test_min_p_is_relative_to_the_most_likely() -> None:
    logits = torch.tensor([[0.5, 0.26, 0.14, 0.1]]).log()
    sampling.filter_logits(logits, *same(1, min_p=0.5).tensors())
    assert torch.nonzero(logits[0] > -INF).flatten().tolist() == [0, 1]


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    rows = 20000
    logits = probabilities.log().expand(rows, -1)
    ids = draw(logits, same(rows), torch.full((rows,), 17), torch.arange(rows))
    counts = torch.bincount(ids, minlength=5) / rows
    assert counts[1] == 0
    torch.testing.assert_close(counts, probabilities, rtol=0, atol=0.012)


def test_stream_is_that_of_seed_and_offset() -> None:
    # Known answers of Philox4x32-10 for counter 0 and key 0 (the two low words of the block).
    assert naive.draw_uniform(0, 0) == ((0xE169C58D6627E8D5 >> 11) * 2.0**-53)
    logits = torch.zeros(64, 3000)
    one = draw(logits, same(64), torch.full((64,), 5), torch.arange(64))
    assert len(set(one.tolist())) > 55
    assert torch.equal(one, draw(logits, same(64), torch.full((64,), 5), torch.arange(64)))
    other = draw(logits, same(64), torch.full((64,), 5 + 2**40), torch.arange(64))
    assert int((one == other).sum()) < 5
    shifted = draw(logits, same(64), torch.full((64,), 5), torch.arange(64) + 2**40)
    assert int((one == shifted).sum()) < 5


def test_greedy_rows_among_drawn_ones() -> None:
    logits = random_rows(9, 777, dtype=torch.float32, seed=3)
    filters = same(9, top_k=5)
    filters.temperature[::2] = 0.0
    ids = draw(logits, filters, torch.zeros(9, dtype=torch.int64), torch.arange(9))
    assert torch.equal(ids[::2], logits.argmax(-1)[::2])


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_argmax_takes_the_first_of_equals(isa: str, vocab: int) -> None:
    logits = random_rows(7, vocab, dtype=torch.float32, seed=vocab).round()
    logits[3] = float("nan")
    logits[4] = -INF
    logits[5, vocab // 2 :] = INF
    logits[6, 0] = float("nan")
    actual, expected = torch.full((7,), -1), torch.full((7,), -1)
    sampling.argmax(actual, logits)
    naive.argmax(expected, logits)
    assert torch.equal(actual, expected)


def test_extreme_logits_never_leave_the_kept_set() -> None:
    rows = torch.tensor(
        [
            [-INF, -INF, -3.0, -INF],
            [float("nan"), 1.0, float("nan"), -INF],
            [INF, 0.0, -1.0, 3e38],
            [3e38, -3e38, 0.0, 1.0],
            [-3e38, -3e38, -3e38, -INF],
        ]
    )
    allowed = [{2}, {1}, {0, 3}, {0}, {0, 1, 2}]
    for temperature in (1e-5, 0.7, 1e30):
        for filters in (
            same(5, temperature),
            same(5, temperature, top_p=0.9),
            same(5, temperature, top_k=3),
            same(5, temperature, min_p=0.1),
        ):
            for offset in range(20):
                ids = draw(rows, filters, torch.arange(5), torch.full((5,), offset))
                wide = temperature == 1e30
                for row, token in enumerate(ids.tolist()):
                    ok = rows[row, token] > -INF if wide else token in allowed[row]
                    assert ok, (temperature, row, token)
    nothing = torch.full((2, 100), -INF)
    assert draw(
        nothing, same(2, top_p=0.5), torch.zeros(2).long(), torch.zeros(2).long()
    ).tolist() == [0, 0]


def test_rows_stand_alone(isa: str) -> None:
    rows, vocab = 8, 150_000  # long enough for several threads on one row
    logits = random_rows(rows, vocab, dtype=torch.float32, seed=8, scale=3.0)
    filters = mixed(rows, vocab, seed=9)
    seeds, offsets = torch.arange(rows) * 31, torch.arange(rows) + 2

    def run(picked: list[int]) -> Tensor:
        chosen = logits[picked]
        ids = draw(chosen, filters.rows(picked), seeds[picked], offsets[picked])
        sampling.filter_logits(chosen, *filters.rows(picked).tensors())
        return torch.cat((ids[:, None].float(), chosen), -1)

    assert_rows_stand_alone(run, rows)


def test_rows_at_a_stride_are_read_and_not_changed() -> None:
    wide = random_rows(6, 200, dtype=torch.float32, seed=10)
    view = wide[:, 50:150]
    before = wide.clone()
    seeds = torch.arange(6)
    strided = draw(view, same(6, top_p=0.8), seeds, seeds)
    assert torch.equal(strided, draw(view.contiguous(), same(6, top_p=0.8), seeds, seeds))
    assert torch.equal(wide, before)


def test_bad_arguments_name_what_was_given() -> None:
    logits, ids, zeros = torch.randn(2, 10), torch.zeros(2).long(), torch.zeros(2).long()
    ok = same(2).tensors()
    with pytest.raises(ShapeError, match="logits is BFloat16, expected Float"):
        sampling.sample(ids, logits.bfloat16(), *ok, zeros, zeros)
    with pytest.raises(ShapeError, match="logits is Double, expected Float"):
        sampling.argmax(ids, logits.double())
    with pytest.raises(ShapeError, match=r"top_k is Long, expected Int"):
        sampling.sample(ids, logits, ok[0], ok[1], ok[2].long(), ok[3], zeros, zeros)
    with pytest.raises(ShapeError, match=r"seeds has shape \[3\], dimension 0 must be 2"):
        sampling.sample(ids, logits, *ok, torch.zeros(3).long(), zeros)
    with pytest.raises(ShapeError, match="vocabulary must have 1 to"):
        sampling.argmax(ids, torch.empty(2, 0))
    with pytest.raises(ShapeError, match="out_ids is Int, expected Long"):
        sampling.argmax(ids.int(), logits)
    with pytest.raises(ShapeError, match="rank 2"):
        sampling.argmax(ids, logits[0])


def test_no_rows() -> None:
    none = torch.zeros(0).long()
    assert draw(torch.empty(0, 10), same(0), none, none).tolist() == []
