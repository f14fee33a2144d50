"""The sampler on a GPU: what it gives on a CPU, without waiting, without copies that repeat."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.utils.logprobs import compute_logprobs
from vllm.model_executor.layers import draw_columns, logits_rules
from vllm.model_executor.layers.sampler import Sampler, SampleRequest, SampleResult
from vllm.model_executor.layers.sampling_state import SamplingState
from vllm.step import NewRow, RowSampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB = 5000
KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "num_logprobs": 3},
    {"temperature": 0.8, "seed": 4},
    {"temperature": 1.3, "seed": 5, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.0, "seed": -6, "min_p": 0.05, "num_logprobs": 0},
    {"temperature": 0.7, "seed": 7, "top_p": 0.9, "num_logprobs": 5},
    {"temperature": 0.0, "repetition_penalty": 1.7, "num_logprobs": 2},
    {"temperature": 1.0, "seed": 8, "frequency_penalty": 0.5, "presence_penalty": -0.3},
    {"temperature": 0.0, "logit_bias": {4: 30.0, 9: -5.0}},
    {"temperature": 0.9, "seed": 9, "allowed_token_ids": (4, 8, 4999), "num_logprobs": 5},
    {"temperature": 0.0, "bad_words_token_ids": ((5,), (2, 9), (9, 2, 10))},
    {"temperature": 0.0, "min_tokens": 50, "stop_token_ids": (1, 2, 70000)},
]


def make_state(processors: tuple = (), **params: object) -> SamplingState:
    row = NewRow(
        seq_id=1,
        branch=0,
        token_ids=[1, 2, 3, 9, 2],
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_ids=([],),
        sampling=RowSampling(**params),
        logits_processors=processors,
    )
    return SamplingState(row)


def make_logits(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def want(states: Sequence[SamplingState], **options: object) -> list[SampleRequest]:
    return [SampleRequest(s, num_outputs=s.num_outputs, **options) for s in states]


def assert_same(found: Sequence[SampleResult], expected: Sequence[SampleResult]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.token_ids, ours.error) == (theirs.token_ids, theirs.error)
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        for one, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert (one.token_ids, one.rank) == (other.token_ids, other.rank)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@torch.inference_mode()
def test_steps_equal_those_on_a_cpu() -> None:
    """All kinds of rows together, over several steps, and each step without a wait."""
    sides = {
        device: (Sampler(), [make_state(**kind) for kind in KINDS]) for device in ("cpu", "cuda")
    }
    for step in range(6):
        logits = make_logits(len(KINDS), step)
        logits[0] = float("nan") if step == 3 else logits[0]
        results = {}
        for device, (sampler, states) in sides.items():
            values = logits.to(device).clone()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            pending = sampler.start(values, want(states))
            torch.cuda.set_sync_debug_mode("default")
            results[device] = pending.wait()
            for state, result, token in zip(
                states, results[device], pending.next_ids.tolist(), strict=True
            ):
                assert 0 <= token < VOCAB
                assert result.error is not None or token == result.token_ids[0]
                state.append(token)
        assert_same(results["cuda"], results["cpu"])
        assert (results["cuda"][0].error is not None) == (step == 3)


@torch.inference_mode()
def test_samples_masks_and_processors_equal_those_on_a_cpu() -> None:
    mask = (torch.arange(VOCAB // 32 + 1) * 2654435761 % 2**31).int().numpy().tobytes()

    def add(output_ids: list[int], logits: Tensor) -> Tensor:
        return logits + torch.arange(VOCAB, device=logits.device) % 7

    found = {}
    for device in ("cpu", "cuda"):
        kinds = [make_state(**kind) for kind in KINDS]
        sampler, logits = Sampler(), make_logits(len(KINDS), 11).to(device)
        found[device] = sampler(logits.clone(), want(kinds, num_samples=3))
        found[device] += sampler(logits.clone(), want(kinds, token_mask=mask))
        bent = [make_state(processors=(add,), **kind) for kind in KINDS]
        found[device] += sampler(logits.clone(), want(bent))
    assert_same(found["cuda"], found["cpu"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[:2], KINDS], ids=["plain", "logprobs", "all"])
@pytest.mark.parametrize("num_samples", [1, 3])
@torch.inference_mode()
def test_narrow_logits_give_what_wide_ones_give(
    dtype: torch.dtype, kinds: list[dict[str, object]], num_samples: int
) -> None:
    logits = make_logits(len(kinds), 12).cuda().to(dtype)
    wide = logits.float()
    found, expected = (
        Sampler()(values, want([make_state(**kind) for kind in kinds], num_samples=num_samples))
        for values in (logits, wide)
    )
    assert_same(found, expected)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3], KINDS[9], KINDS[11]], ids=str)
@torch.inference_mode()
def test_the_same_rows_again_copy_nothing(
    kind: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, states = Sampler(), [make_state(**kind) for _ in range(4)]
    sampler(make_logits(4, 0).cuda(), want(states))

    def refuse(*_: object) -> None:
        raise AssertionError("copied to the device")

    monkeypatch.setattr(draw_columns, "upload", refuse)
    monkeypatch.setattr(logits_rules, "upload", refuse)
    for step in range(1, 4):
        for state in states:
            state.append(3)
        logits = make_logits(4, step)
        found = sampler(logits.cuda(), want(states))
        monkeypatch.undo()
        fresh = Sampler()(logits, want([_copy(state, kind) for state in states]))
        monkeypatch.setattr(draw_columns, "upload", refuse)
        monkeypatch.setattr(logits_rules, "upload", refuse)
        assert_same(found, fresh)


def _copy(state: SamplingState, kind: dict[str, object]) -> SamplingState:
    copy = make_state(**kind)
    while copy.num_outputs < state.num_outputs:
        copy.append(3)
    return copy


def test_more_alternatives_than_the_op_finds_are_sorted() -> None:
    logits = make_logits(3, 1)
    logits[1, ::2] = float("-inf")
    logits[2] = float("nan")
    chosen = torch.tensor([5, 7, 9])
    found = compute_logprobs(logits.cuda(), chosen.cuda(), [700, 2600, 2])
    for ours, theirs in zip(found, compute_logprobs(logits, chosen, [700, 2600, 2]), strict=True):
        assert (ours.token_ids, ours.rank) == (theirs.token_ids, theirs.rank)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
