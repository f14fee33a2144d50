"""The sampler step by step against a plain reference, and its independence of neighbours."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.utils.logprobs import compute_logprobs
from vllm.model_executor.layers.sampler import Sampler, SampleRequest
from vllm.model_executor.layers.sampling_state import SamplingState, SeenTokens, mix_seed
from vllm.step import NewRow, RowSampling

VOCAB = 50
NEVER = -math.inf


def make_state(
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    branch: int = 0,
    processors: tuple = (),
    **params: object,
) -> SamplingState:
    return SamplingState(
        NewRow(
            seq_id=1,
            branch=branch,
            token_ids=[*prompt, *output],
            num_prompt_tokens=len(prompt),
            num_computed_tokens=0,
            block_ids=([],),
            sampling=RowSampling(**params),
            logits_processors=processors,
        )
    )


def want(
    state: SamplingState, num_samples: int = 1, token_mask: bytes | None = None
) -> SampleRequest:
    return SampleRequest(state, num_samples, token_mask, num_outputs=state.num_outputs)


def draw_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def sample_one(logits_V: Tensor, state: SamplingState, num_samples: int = 1):
    return Sampler()(logits_V[None].clone(), [want(state, num_samples)])[0]


def reference_logits(
    logits_V: Tensor, prompt: Sequence[int], output: Sequence[int], p: RowSampling
) -> Tensor:
    """Everything before the temperature, written from the documentation with loops."""
    x = logits_V.double().tolist()
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    if p.allowed_token_ids is not None:
        x = [v if t in p.allowed_token_ids else NEVER for t, v in enumerate(x)]
    for word in p.bad_words_token_ids:
        head = list(word[:-1])
        if len(output) >= len(head) and list(output)[len(output) - len(head) :] == head:
            x[word[-1]] = NEVER
    if len(output) < p.min_tokens:
        for token in p.stop_token_ids:
            x[token] = NEVER
    counts = Counter(output)
    for token in set(prompt) | set(output):
        x[token] = (
            x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        )
        x[token] -= counts[token] * p.frequency_penalty
        x[token] -= (counts[token] > 0) * p.presence_penalty
    return torch.tensor(x, dtype=torch.float64)


def reference_probabilities(x: Tensor, p: RowSampling) -> Tensor:
    """Temperature, top-k, top-p, min-p, softmax."""
    x = x / p.temperature
    if p.top_k > 0:
        x = torch.where(x >= x.topk(p.top_k).values[-1], x, NEVER)
    ordered, indices = x.softmax(-1).sort(descending=True)
    keep = (ordered.cumsum(-1) - ordered) < p.top_p
    x[indices[~keep]] = NEVER
    probabilities = x.softmax(-1)
    x = torch.where(probabilities >= p.min_p * probabilities.max(), x, NEVER)
    return x.softmax(-1)


PIPELINES = [
    {},
    {"logit_bias": {4: 3.0, 7: -100.0}},
    {"allowed_token_ids": (5, 6, 9, 30, 31)},
    {"bad_words_token_ids": ((8,), (2, 9), (9, 2, 10), (3, 11))},
    {"min_tokens": 6, "stop_token_ids": (0, 12)},
    {"min_tokens": 5, "stop_token_ids": (0, 12)},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 1.9},
    {"repetition_penalty": 0.6, "frequency_penalty": 2.0, "presence_penalty": -1.0},
    {"logit_bias": {2: 5.0}, "min_tokens": 9, "stop_token_ids": (2,), "repetition_penalty": 1.4},
]


@pytest.mark.parametrize("params", PIPELINES, ids=str)
def test_greedy_token_and_logprobs_equal_the_reference(params: dict) -> None:
    prompt, output = [1, 2, 3, 3, 20], [5, 9, 2, 9, 2]
    for seed in range(10):
        logits = draw_logits(1, seed)[0]
        state = make_state(prompt, output, temperature=0.0, num_logprobs=4, **params)
        result = sample_one(logits, state)
        expected = reference_logits(logits, prompt, output, state.params)
        assert result.token_ids == [int(expected.argmax())]
        logprobs = expected.log_softmax(-1)
        entry = result.logprobs[0]
        assert entry.token_ids[0] == result.token_ids[0]
        assert entry.token_ids[1:] == expected.topk(4).indices.tolist()
        torch.testing.assert_close(
            torch.tensor(entry.logprobs).double(), logprobs[entry.token_ids], atol=1e-5, rtol=0
        )
        assert entry.rank == 1


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.6, "top_k": 6},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.3, "min_p": 0.2},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "presence_penalty": 1.0},
    ],
    ids=str,
)
def test_draws_follow_the_documented_distribution(params: dict) -> None:
    prompt, output = [1, 2, 3], [4, 4]
    num_draws = 4000
    logits = draw_logits(1, 42)
    state = make_state(prompt, output, seed=9, **params)
    p = state.params
    expected = reference_probabilities(reference_logits(logits[0], prompt, output, p), p)
    result = Sampler()(logits.clone(), [want(state, num_draws)])[0]
    found = torch.bincount(torch.tensor(result.token_ids), minlength=VOCAB).double() / num_draws
    assert (found[expected == 0] == 0).all()
    sigma = (expected * (1 - expected) / num_draws).sqrt()
    assert ((found - expected).abs() <= 5 * sigma + 3 / num_draws).all()


def test_logprobs_are_those_of_what_was_drawn_from() -> None:
    """After temperature and filters; a filtered token has minus infinity, the chosen one never."""
    logits = draw_logits(1, 5)[0]
    state = make_state(temperature=1.7, top_k=3, num_logprobs=5, seed=1)
    expected = reference_probabilities(logits.double().clone(), state.params)
    entry = sample_one(logits, state).logprobs[0]
    found = dict(zip(entry.token_ids, entry.logprobs, strict=True))
    for token, value in found.items():
        assert value == pytest.approx(
            math.log(expected[token]) if expected[token] else NEVER, abs=1e-5
        )
    assert sum(v == NEVER for v in entry.logprobs) == 2
    assert entry.logprobs[0] > NEVER


def test_zero_alternatives_still_give_the_chosen_token() -> None:
    """C14: zero means no alternatives, not off."""
    logits = draw_logits(2, 6)
    zero, off = make_state(temperature=0.0, num_logprobs=0), make_state(temperature=0.0)
    results = Sampler()(logits.clone(), [want(zero), want(off)])
    entry = results[0].logprobs[0]
    assert entry.token_ids == results[0].token_ids
    expected = logits[0].log_softmax(-1)[entry.token_ids[0]].item()
    assert entry.logprobs == [pytest.approx(expected, abs=1e-5)]
    assert results[1].logprobs is None


def test_penalties_do_not_leak_to_neighbours() -> None:
    """C18: only the row's own generated tokens are counted, in any order of the batch."""
    rows = {
        "frequency": ([7, 8, 7, 7], {"frequency_penalty": 1.5}),
        "none": ([7, 8], {}),
        "repetition": ([9, 10, 11], {"repetition_penalty": 1.3}),
    }
    alone = {name: run_alone(prompt, params) for name, (prompt, params) in rows.items()}
    for order in itertools.permutations(rows):
        states = {
            name: make_state(rows[name][0], temperature=0.0, **rows[name][1]) for name in order
        }
        found: dict[str, list[int]] = {name: [] for name in order}
        for step in range(20):
            logits = torch.stack([step_logits(name, found[name], step, rows) for name in order])
            results = Sampler()(logits, [want(states[name]) for name in order])
            for name, result in zip(order, results, strict=True):
                found[name] += result.token_ids
                states[name].append(result.token_ids[0])
        assert found == alone


def step_logits(name: str, output: Sequence[int], step: int, rows: dict) -> Tensor:
    """Stands in for a model: logits from a row's own history that make it repeat itself."""
    logits = draw_logits(1, sum(rows[name][0]) + len(output))[0]
    logits[7 + len(output) % 3] += 4.0
    return logits


def run_alone(prompt: Sequence[int], params: dict) -> list[int]:
    output: list[int] = []
    rows = {"it": (prompt, params)}
    for step in range(20):
        logits = step_logits("it", output, step, rows)
        p = RowSampling(temperature=0.0, **params)
        output.append(int(reference_logits(logits, prompt, output, p).argmax()))
    return output


def test_a_token_depends_on_seed_branch_and_position_alone() -> None:
    logits = draw_logits(1, 8)[0]
    params = {"temperature": 2.0, "seed": 77}
    alone = sample_one(logits, make_state(output=[4, 5], **params)).token_ids
    crowd = torch.stack([draw_logits(1, i)[0] for i in range(9)] + [logits])
    states = [make_state(temperature=i / 3, seed=i, num_logprobs=2) for i in range(9)]
    requests = [want(s) for s in [*states, make_state(output=[4, 5], **params)]]
    assert Sampler()(crowd, requests)[9].token_ids == alone
    resumed = make_state(output=[4], **params)
    resumed.append(5)
    assert sample_one(logits, resumed).token_ids == alone
    positions = [
        sample_one(logits, make_state(output=[0] * i, **params)).token_ids[0] for i in range(30)
    ]
    branches = [sample_one(logits, make_state(branch=i, **params)).token_ids[0] for i in range(30)]
    seeds = [
        sample_one(logits, make_state(temperature=2.0, seed=i)).token_ids[0] for i in range(30)
    ]
    for drawn in (positions, branches, seeds):
        assert len(set(drawn)) > 5


def test_seeds_and_branches_have_unrelated_streams() -> None:
    keys = {mix_seed(seed, branch) for seed in range(-50, 50) for branch in range(50)}
    assert len(keys) == 5000
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert mix_seed(2**63 - 1, 0) != mix_seed(-(2**63), 0)


def test_rows_of_a_mixed_batch_equal_rows_alone() -> None:
    states = [
        make_state(temperature=0.0),
        make_state(temperature=1.0, seed=4, top_k=8),
        make_state([1, 2], [3], temperature=0.9, seed=5, repetition_penalty=1.5, num_logprobs=3),
        make_state(temperature=0.0, allowed_token_ids=(4, 8), num_logprobs=0),
        make_state(temperature=1.2, seed=6, logit_bias={9: 4.0}),
    ]
    logits = draw_logits(len(states), 10)
    samples = [1, 3, 1, 1, 2]
    together = Sampler()(logits.clone(), [want(s, n) for s, n in zip(states, samples, strict=True)])
    for row, (state, n) in enumerate(zip(states, samples, strict=True)):
        assert together[row] == sample_one(logits[row], state, num_samples=n)


def test_steps_of_one_sampler_equal_steps_of_many() -> None:
    """Columns that are kept from step to step: rows stay, move on, skip, change, come back."""
    kinds = [
        {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (5, 6)},
        {"temperature": 1.0, "seed": 4, "top_k": 8},
        {"temperature": 1.2, "seed": 6, "num_logprobs": 2, "bad_words_token_ids": ((4,), (4, 9))},
        {"temperature": 0.9, "seed": 5, "allowed_token_ids": (4, 8, 9), "logit_bias": {8: 1.0}},
    ]
    states = [make_state(output=[4], **kind) for kind in kinds]
    steps = [([0, 1, 2, 3], 1, skip) for skip in (1, 2, 3, 3, 9)]
    steps += [([0, 1, 2], 1, 10), ([2, 1, 0], 1, 11), ([2, 1, 0], 2, 12), ([0], 1, 13)]
    one = Sampler()
    for number, (rows, num_samples, num_outputs) in enumerate(steps):
        requests = [
            SampleRequest(states[row], num_samples, num_outputs=num_outputs) for row in rows
        ]
        fresh = [
            SampleRequest(
                make_state(output=[4], **kinds[row]), num_samples, num_outputs=num_outputs
            )
            for row in rows
        ]
        logits = draw_logits(len(rows), number)
        pending = one.start(logits.clone(), requests)
        expected = Sampler()(logits, fresh)
        assert pending.wait() == expected
        assert pending.next_ids.tolist() == [result.token_ids[0] for result in expected]


def test_the_offset_is_that_of_the_request() -> None:
    """A state may not know yet of the tokens that are on their way."""
    logits = draw_logits(1, 3)
    late = make_state(temperature=2.0, seed=3)
    for count in range(20):
        told = make_state(output=[7] * count, temperature=2.0, seed=3)
        [found] = Sampler()(logits.clone(), [SampleRequest(late, num_outputs=count)])
        assert found == sample_one(logits[0], told)


def test_processors_run_first_and_see_prompt_and_output() -> None:
    seen = []

    def two(output_ids, logits):
        seen.append((None, output_ids))
        return logits + torch.nn.functional.one_hot(torch.tensor(7), VOCAB) * 50.0

    def three(prompt_ids, output_ids, logits):
        seen.append((prompt_ids, output_ids))
        logits[7] -= 100.0
        logits[11] += 60.0
        return logits

    state = make_state(
        [1, 2], [3], processors=(two, three), temperature=0.0, logit_bias={11: -100.0, 13: 40.0}
    )
    assert sample_one(draw_logits(1)[0], state).token_ids == [13]
    assert seen == [(None, [3]), ([1, 2], [3])]


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda ids, logits: None, "returned NoneType"),
        (lambda ids, logits: logits[:3], "returned (3,)"),
        (lambda ids, logits: 1 / 0, "ZeroDivisionError"),
        (lambda ids, logits: logits.fill_(NEVER), "no token can follow"),
        (lambda ids, logits: logits * math.nan, "no token can follow"),
    ],
)
def test_faults_stay_in_their_row(processor, message: str) -> None:
    logits = draw_logits(2, 3)
    requests = [
        want(make_state(temperature=0.7, seed=1, processors=(processor,))),
        want(make_state(temperature=0.7, seed=2)),
    ]
    bad, good = Sampler()(logits.clone(), requests)
    assert message in bad.error
    assert bad.token_ids == []
    assert good == sample_one(logits[1], make_state(temperature=0.7, seed=2))


def test_ids_outside_the_vocabulary_are_that_requests_error() -> None:
    """C16: the engine checks them; whatever slips through must not end the step."""
    for params in ({"logit_bias": {VOCAB: 1.0}}, {"allowed_token_ids": (-1,)}):
        result = sample_one(draw_logits(1)[0], make_state(temperature=0.0, **params))
        assert f"outside 0..{VOCAB - 1}" in result.error
    ignored = make_state(temperature=0.0, min_tokens=3, stop_token_ids=(VOCAB + 5, -1))
    assert sample_one(draw_logits(1)[0], ignored).error is None


def test_nan_of_a_plain_row_is_reported() -> None:
    logits = draw_logits(3)
    logits[1] = math.nan
    results = Sampler()(logits, [want(make_state(temperature=0.0)) for _ in range(3)])
    assert [r.error is None for r in results] == [True, False, True]


def test_seen_tokens_count_incrementally() -> None:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 400, (300,), generator=generator).tolist()
    output = torch.randint(0, 400, (500,), generator=generator).tolist()
    seen = SeenTokens(prompt, output[:50])
    for token in output[50:]:
        seen.append(token)
    counts = Counter(output)
    assert sorted(seen.ids.tolist()) == sorted(set(prompt) | set(output))
    assert {int(t): int(c) for t, c in zip(seen.ids, seen.counts, strict=True)} == {
        t: counts[t] for t in set(prompt) | set(output)
    }


def test_compute_logprobs_ranks_from_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    [entry] = compute_logprobs(logits, torch.tensor([2]), [2])
    assert entry.rank == 3
    assert entry.token_ids == [2, 1, 3]
