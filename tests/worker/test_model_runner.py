"""The model runner on a toy model: chunks, batches, poison, logprobs, errors of single rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.utils.toy_model import GREEDY, ToyDriver, ToyModel
from vllm.step import RowSampling

VOCAB = 61
PROMPTS = [
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6],
    [7],
    [2, 7, 1, 8, 2, 8, 1, 8],
    [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22],
    [33, 44],
    [60, 0, 60, 0, 60],
]


@pytest.fixture(scope="module")
def model() -> ToyModel:
    return ToyModel(VOCAB)


@pytest.fixture(params=["cpu", "torch"])
def driver(request: pytest.FixtureRequest, model: ToyModel, monkeypatch) -> ToyDriver:
    monkeypatch.setenv("VLLM_POISON_CACHE", "1")
    return ToyDriver(model, kernel=request.param)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 16, 1000])
def test_greedy_equals_dense_in_any_chunk(driver: ToyDriver, model: ToyModel, chunk: int) -> None:
    sequences = [driver.add(p) for p in PROMPTS]  # more than max_num_seqs: the batch grows
    driver.run(sequences, 12, chunk)
    for prompt, seq in zip(PROMPTS, sequences, strict=True):
        assert seq.output_ids == model.reference_greedy(prompt, 12)


def test_outputs_come_in_plan_order_when_prefill_and_decode_mix(driver: ToyDriver) -> None:
    first, second = driver.add(PROMPTS[0]), driver.add(PROMPTS[2])
    driver.step([(second, 8)])
    long = driver.add(PROMPTS[3])
    rows = driver.step([(first, 5), (second, 1), (long, 13)])
    assert [r.seq_id for r in rows] == [first.seq_id, second.seq_id, long.seq_id]
    assert [len(r.token_ids) for r in rows] == [0, 1, 1]


def test_preempted_sequence_goes_on_as_if_nothing_had_happened(
    driver: ToyDriver, model: ToyModel
) -> None:
    sampling = RowSampling(temperature=1.0, seed=11, frequency_penalty=0.5)
    undisturbed, disturbed = (driver.add(PROMPTS[0], sampling) for _ in range(2))
    driver.run([undisturbed, disturbed], 5)
    driver.preempt(disturbed)
    driver.run([undisturbed, disturbed], 12, chunk=4)
    assert disturbed.output_ids == undisturbed.output_ids


@pytest.mark.parametrize("sampling", [GREEDY, RowSampling(temperature=0.8, top_k=5, seed=3)])
@pytest.mark.parametrize("chunk", [4, 1000])
def test_prompt_logprobs_describe_the_model(
    driver: ToyDriver, model: ToyModel, sampling: RowSampling, chunk: int
) -> None:
    prompt = PROMPTS[0]
    asked = RowSampling(
        **{k: getattr(sampling, k) for k in ("temperature", "top_k", "seed")},
        num_prompt_logprobs=2,
    )
    seq, neighbour = driver.add(prompt, asked), driver.add(PROMPTS[2])
    driver.run([seq, neighbour], 2, chunk)
    expected = model.reference_logits(prompt).log_softmax(-1)
    found = {}
    for row in seq.outputs:
        for i, entry in enumerate(row.prompt_logprobs or []):
            found[row.prompt_start + i] = entry
    assert sorted(found) == list(range(1, len(prompt)))
    for position, entry in found.items():
        values = expected[position - 1]
        token = prompt[position]
        assert entry.token_ids == [token, *values.topk(2).indices.tolist()]
        torch.testing.assert_close(
            torch.tensor(entry.logprobs), values[entry.token_ids], atol=1e-4, rtol=0
        )
        assert entry.rank == int((values > values[token]).sum()) + 1
    assert all(row.prompt_logprobs is None for row in neighbour.outputs)


def test_a_fork_draws_each_branch_from_its_own_stream(driver: ToyDriver) -> None:
    sampling = RowSampling(temperature=2.0, seed=5)
    forking = driver.add(PROMPTS[2], sampling)
    [row] = driver.step([(forking, 8)], num_samples=16)
    alone = [driver.add(PROMPTS[2], sampling, branch=b) for b in range(16)]
    for seq in alone:
        driver.step([(seq, 8)])
    assert row.token_ids == [seq.output_ids[0] for seq in alone]
    assert len(set(row.token_ids)) > 4
    assert forking.output_ids == row.token_ids[:1]


def test_grammar_mask_limits_only_its_row(driver: ToyDriver, model: ToyModel) -> None:
    masked, free = driver.add(PROMPTS[2]), driver.add(PROMPTS[2])
    bits = np.zeros(64, dtype=bool)
    bits[[17, 40]] = True
    mask = np.packbits(bits, bitorder="little").tobytes()
    driver.step([(masked, 8), (free, 8)], masks={masked.seq_id: mask})
    expected = model.reference_logits(PROMPTS[2])[-1]
    assert masked.output_ids == [17 if expected[17] > expected[40] else 40]
    assert free.output_ids == [int(expected.argmax())]


def test_a_raising_processor_fails_its_row_only(driver: ToyDriver, model: ToyModel) -> None:
    def explode(output_ids, logits):
        if len(output_ids) == 2:
            raise RuntimeError("boom")
        return logits

    bad = driver.add(PROMPTS[0], processors=(explode,))
    good = driver.add(PROMPTS[2])
    for _ in range(2):
        driver.step([(s, len(s.tokens) - s.computed) for s in (bad, good)])
    rows = driver.step([(bad, 1), (good, 1)])
    assert "RuntimeError: boom" in rows[0].error
    assert rows[0].token_ids == []
    driver.run([good], 8)
    assert good.output_ids == model.reference_greedy(PROMPTS[2], 8)


def test_logits_that_are_not_numbers_fail_their_row_only(
    driver: ToyDriver, model: ToyModel
) -> None:
    def spoil(prompt_ids, output_ids, logits):
        return torch.full_like(logits, math.nan)

    bad, good = driver.add(PROMPTS[0], processors=(spoil,)), driver.add(PROMPTS[2])
    rows = driver.step([(bad, 21), (good, 8)])
    assert "no token can follow" in rows[0].error
    assert rows[1].error is None
    assert len(rows[1].token_ids) == 1
    bad.tokens.append(0)  # a step that was planned before the error was known
    driver.step([(bad, 1), (good, 1)])
    driver.run([good], 6)
    assert good.output_ids == model.reference_greedy(PROMPTS[2], 6)


def test_poison_is_seen_by_a_kernel_that_reads_unwritten_rows(driver: ToyDriver) -> None:
    """The debug switch works: what was never written is NaN."""
    seq = driver.add(PROMPTS[0])
    driver.step([(seq, 21)])
    view = driver.cache.caches[0].tensors[0]
    offset = driver.cache.geometries[0].get_offset(seq.blocks[-1])
    assert torch.isfinite(view[offset, 0]).all()
    assert torch.isnan(view[offset, 1:]).all()


def test_step_without_rows_only_moves_rows_out(driver: ToyDriver) -> None:
    seq = driver.add(PROMPTS[2])
    driver.run([seq], 3)
    driver.preempt(seq)
    assert driver.step([]) == []
    driver.run([seq], 6)
