"""Public bug reports (C07 … C18) on whole engines with tiny models."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.utils.fixtures_models import build_reach, make_reach_prompt
from tests.utils.one_thread import one_thread  # noqa: F401  a fixture for the whole module
from tests.utils.tiny_models import TinyModels
from vllm import LLM, SamplingParams
from vllm.errors import ConfigError, EngineDeadError, RequestError
from vllm.outputs import RequestOutput
from vllm.sampling_params import GuidedDecodingParams

TWO_KINDS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 20,
}


@contextmanager
def engine(model: Path, **options: Any) -> Iterator[LLM]:
    options = {"dtype": "float32", "max_num_seqs": 16, "num_gpu_blocks_override": 128, **options}
    llm = LLM(str(model), **options)
    try:
        yield llm
    finally:
        llm.llm_engine.shutdown()


def run(llm: LLM, prompts: Sequence[Sequence[int]], params: Any) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(a.token_ids) for o in outputs for a in o.outputs]


def logprobs(outputs: Sequence[RequestOutput]) -> list[float]:
    return [
        entry[token].logprob
        for o in outputs
        for token, entry in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)
    ]


def test_c07_greedy_answers_do_not_depend_on_what_ran_before(tiny_models: TinyModels) -> None:
    model = tiny_models.reach("gemma3_text", **TWO_KINDS)
    prefix = make_reach_prompt(80, seed=2)  # above the grain of any mix of layers
    prompts = [prefix + make_reach_prompt(7 + 5 * i, seed=10 + i) for i in range(6)]
    warmup = [prefix + make_reach_prompt(3 + 4 * i, seed=30 + i) for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
    with engine(model, max_num_seqs=1, enable_prefix_caching=False) as llm:
        reference = run(llm, prompts, params)
        assert all(o.num_cached_tokens == 0 for o in reference)
    with engine(model, max_num_seqs=1, block_size=16) as llm:
        runs = [run(llm, prompts, params)]
        first = [o.outputs[0].token_ids[9] for o in run(llm, warmup, params)]
        stops = [SamplingParams(temperature=0, max_tokens=32, stop_token_ids=[t]) for t in first]
        run(llm, warmup, stops)
        runs.append(run(llm, prompts, params))
        runs.append(run(llm, prompts[::-1], params)[::-1])
        assert sum(o.num_cached_tokens for o in runs[1]) >= 64, "else this proves nothing"
    for outputs in runs:
        assert ids(outputs) == ids(reference)
        assert (
            max(abs(a - b) for a, b in zip(logprobs(outputs), logprobs(reference), strict=True))
            < 1e-4
        )


def test_c09_what_is_cached_is_shared_among_equal_salts_only(tiny_models: TinyModels) -> None:
    """There are no adapters here: the salt is what separates one tenant's cache from another's."""
    model = tiny_models.reach("llama", num_hidden_layers=2)
    prompt = make_reach_prompt(64)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with engine(model, enable_prefix_caching=False) as llm:
        reference = ids(run(llm, [prompt], params))
    with engine(model, block_size=16) as llm:
        cached = []
        for salt in (None, "A", "B", "A", "B", "", "C"):
            given = {"prompt_token_ids": prompt, "cache_salt": salt}
            outputs = llm.generate([given], params, use_tqdm=False)
            assert ids(outputs) == reference
            cached.append(outputs[0].num_cached_tokens)
    assert cached == [0, 0, 0, 48, 48, 48, 0]


@pytest.mark.parametrize("kind", ["two kinds", "full"])
def test_c10_the_size_of_chunks_changes_nothing(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("VLLM_POISON_CACHE", "1")
    config = TWO_KINDS if kind == "two kinds" else {"num_hidden_layers": 2}
    model = tiny_models.reach("gemma3_text" if kind == "two kinds" else "llama", **config)
    prompt = make_reach_prompt(300)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
    answers = {}
    for chunk in (16, 17, 48, 64, 512):
        with engine(model, max_num_batched_tokens=chunk, enable_prefix_caching=False) as llm:
            runs = [run(llm, [prompt], params) for _ in range(2)]
            assert ids(runs[0]) == ids(runs[1])
            assert logprobs(runs[0]) == logprobs(runs[1]), "bit for bit"
            answers[chunk] = runs[0]
    reference = answers[512]
    for outputs in answers.values():
        assert ids(outputs) == ids(reference)
        assert (
            max(abs(a - b) for a, b in zip(logprobs(outputs), logprobs(reference), strict=True))
            < 1e-3
        )


def test_c11_a_pool_too_small_for_the_model_is_refused(tiny_models: TinyModels) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len = 512 .*lower max_model_len to 19\d"):
        LLM(str(tiny_models.loop()), num_gpu_blocks_override=12, dtype="float32")


def test_c11_a_prompt_bigger_than_the_pool_does_not_block_others(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine import core

    waived = functools.partial(core.make_layout, check_max_model_len=False)
    monkeypatch.setattr(core, "make_layout", waived)
    with engine(tiny_models.loop(), num_gpu_blocks_override=12) as llm:
        llm.llm_engine.add_request(
            "other", {"prompt_token_ids": [65] * 8}, SamplingParams(temperature=0, max_tokens=8)
        )
        started_s = time.monotonic()
        with pytest.raises(RequestError, match="the KV cache cannot hold"):
            llm.llm_engine.add_request("big", {"prompt_token_ids": [65] * 250}, SamplingParams())
        outputs = []
        while llm.llm_engine.has_unfinished_requests():
            outputs += llm.llm_engine.step()
        assert time.monotonic() - started_s < 5
        assert outputs[-1].outputs[0].text == "A" * 8
        assert llm.llm_engine.stats().num_free_gpu_blocks == 12


def test_c12_preempted_branches_all_end(tiny_models: TinyModels) -> None:
    with engine(
        tiny_models.flat(),
        swap_space=0,
        num_gpu_blocks_override=20,
        max_model_len=128,
        block_size=16,
    ) as llm:
        params = SamplingParams(n=4, temperature=1.0, max_tokens=100, ignore_eos=True)
        outputs = run(llm, [make_reach_prompt(20, seed=i) for i in range(4)], params)
        answers = [a for o in outputs for a in o.outputs]
        assert len(answers) == 16
        assert {(len(a.token_ids), a.finish_reason) for a in answers} == {(100, "length")}
        stats = llm.llm_engine.stats()
        assert stats.num_preemptions > 0
        assert stats.num_free_gpu_blocks == stats.num_total_gpu_blocks
        assert len(run(llm, [[65]], SamplingParams(max_tokens=3, ignore_eos=True))) == 1


def test_seeds_survive_batches_and_preemption(tiny_models: TinyModels) -> None:
    prompts = [make_reach_prompt(20, seed=i) for i in range(6)]
    params = [
        SamplingParams(temperature=1.0, seed=100 + i, max_tokens=60, ignore_eos=True, n=1 + i % 2)
        for i in range(6)
    ]
    with engine(tiny_models.flat()) as llm:
        alone = [ids(run(llm, [p], s)) for p, s in zip(prompts, params, strict=True)]
        assert len({tuple(a) for answers in alone for a in answers}) == 9, (
            "seeds and branches differ"
        )
        together = run(llm, prompts, params)
        assert [ids([o]) for o in together] == alone
        unseeded = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
        assert ids(run(llm, [prompts[0]], unseeded)) != ids(run(llm, [prompts[0]], unseeded))
    with engine(tiny_models.flat(), num_gpu_blocks_override=12, max_model_len=128) as llm:
        crowded = run(llm, prompts, params)
        assert llm.llm_engine.stats().num_preemptions > 0
        assert [ids([o]) for o in crowded] == alone


def test_the_same_engine_seed_gives_the_same_unseeded_answers(tiny_models: TinyModels) -> None:
    answers = []
    for seed in (0, 0, 1):
        with engine(tiny_models.flat(), seed=seed) as llm:
            params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
            answers.append(ids(run(llm, [[65], [66]], params)))
    assert answers[0] == answers[1] != answers[2]


def penalised_reference(
    model: torch.nn.Module,
    prompt: list[int],
    num_tokens: int,
    *,
    frequency: float = 0.0,
    repetition: float = 1.0,
) -> list[int]:
    """Greedy tokens by definition: adjusted logits of the reference model, step by step."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1].float()
        for token in set(tokens):
            if repetition != 1.0:
                value = logits[token]
                logits[token] = value / repetition if value > 0 else value * repetition
        for token in set(tokens[len(prompt) :]):
            logits[token] -= frequency * tokens[len(prompt) :].count(token)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_c18_penalties_stay_with_their_request(tiny_models: TinyModels) -> None:
    reference = build_reach("llama", num_hidden_layers=2)
    solo = penalised_reference(reference, make_reach_prompt(27, seed=3), 3)
    prompts = {
        "a": make_reach_prompt(27, seed=3) + solo[:1] * 3,
        "b": make_reach_prompt(9, seed=4),
        "c": make_reach_prompt(12, seed=5),
    }
    rules = {"a": {"frequency": 1.5}, "b": {}, "c": {"repetition": 1.3}}
    expected = {k: penalised_reference(reference, p, 20, **rules[k]) for k, p in prompts.items()}
    fields = {"a": {"frequency_penalty": 1.5}, "b": {}, "c": {"repetition_penalty": 1.3}}
    params = {
        k: SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **f)
        for k, f in fields.items()
    }
    orders = ["abc", "cba", "bac", "b", "ac", "abcabcabc"]
    with engine(tiny_models.reach("llama", num_hidden_layers=2)) as llm:
        for order in orders:
            outputs = run(llm, [prompts[k] for k in order], [params[k] for k in order])
            assert ids(outputs) == [expected[k] for k in order]


def test_answers_equal_whatever_is_in_the_batch(tiny_models: TinyModels) -> None:
    """Random batches, chunked together with decodes, against each prompt alone."""
    rng = random.Random(7)
    prompts = [make_reach_prompt(rng.randint(1, 120), seed=i) for i in range(12)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            seed=i,
            max_tokens=rng.randint(1, 30),
            ignore_eos=True,
        )
        for i in range(12)
    ]
    with engine(tiny_models.reach("llama", num_hidden_layers=2), max_num_batched_tokens=33) as llm:
        alone = [ids(run(llm, [p], s))[0] for p, s in zip(prompts, params, strict=True)]
        for _ in range(3):
            order = rng.sample(range(12), 12)
            outputs = run(llm, [prompts[i] for i in order], [params[i] for i in order])
            assert ids(outputs) == [alone[i] for i in order]


def test_two_ranks_answer_like_one_and_a_dead_one_ends_the_engine(tiny_models: TinyModels) -> None:
    model = tiny_models.reach("llama", num_hidden_layers=2, num_key_value_heads=2)
    prompts = [make_reach_prompt(n, seed=n) for n in (3, 20, 70)]
    form = GuidedDecodingParams(regex="[a-z]+")
    params = [
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True, n=2),
        SamplingParams(temperature=0, max_tokens=8, guided_decoding=form),
    ]
    with engine(model) as llm:
        alone = ids(run(llm, prompts, params))
    with engine(model, tensor_parallel_size=2) as llm:
        assert ids(run(llm, prompts, params)) == alone
        assert llm.llm_engine.stats().startup["num_ranks"] == 2
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        ranks = [int(c) for c in children if b"run_rank" in Path(f"/proc/{c}/cmdline").read_bytes()]
        os.kill(ranks[-1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            run(llm, [[65]], SamplingParams(max_tokens=50, ignore_eos=True))
        with pytest.raises(EngineDeadError):
            llm.llm_engine.check_health()
