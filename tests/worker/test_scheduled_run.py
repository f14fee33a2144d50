"""Scheduler, executor, worker and a real model together: what is generated never depends on how.

The reference is transformers, dense and without a cache. Every run has the cache filled with NaN
(C10).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.utils.fixtures_models import build_reach, make_reach_prompt, save_checkpoint
from vllm.config import (
    CacheConfig,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from vllm.engine.core import EngineCore
from vllm.executor import make_executor
from vllm.sequence import SequenceRequest
from vllm.step import RowSampling
from vllm.transformers_utils.config import get_config
from vllm.types import DType

NUM_TOKENS = 16
LENS = (300, 1, 17, 64, 130)
GREEDY = RowSampling(temperature=0.0)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A checkpoint on disk, prompts, and what transformers makes of them."""
    window = {"sliding_window": 20} if request.param == "mistral" else {}
    model = build_reach(request.param, num_hidden_layers=2, **window)
    directory = save_checkpoint(model, tmp_path_factory.mktemp(request.param))
    prompts = [make_reach_prompt(n, seed=n) for n in LENS]
    prompts.append(prompts[0][:200] + prompts[3])  # shares a prefix with the first
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(NUM_TOKENS):
                logits = model(ids, use_cache=False).logits[0, -1]
                ids = torch.cat((ids, logits.argmax().view(1, 1)), dim=1)
        answers.append(ids[0, len(prompt) :].tolist())
    return directory, prompts, answers


def make_engine(directory: Path, monkeypatch: pytest.MonkeyPatch, **given: object) -> EngineCore:
    monkeypatch.setenv("VLLM_POISON_CACHE", "1")
    config = EngineConfig(
        model_config=ModelConfig(
            model=str(directory),
            tokenizer=str(directory),
            dtype=DType.FLOAT32,
            hf_config=get_config(str(directory)),
            max_model_len=400,
        ),
        cache_config=CacheConfig(
            block_size=given.get("block_size", 16),
            cache_bytes=8 << 20,
            num_gpu_blocks_override=given.get("num_blocks"),
            enable_prefix_caching=given.get("prefix", True),
        ),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=given.get("budget", 512), max_num_seqs=16, max_model_len=400
        ),
        load_config=LoadConfig(use_tqdm=False),
    )
    return EngineCore(config, make_executor(config))


def generate(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    sampling: RowSampling = GREEDY,
    n: int = 1,
) -> list[list[list[int]]]:
    """Return the tokens of each prompt's branches."""
    for i, prompt in enumerate(prompts):
        engine.scheduler.add(
            SequenceRequest(
                request_id=str(i),
                prompt_token_ids=list(prompt),
                sampling=replace_sampling(sampling, i),
                n=n,
                max_tokens=NUM_TOKENS,
            )
        )
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    while engine.has_work:
        for result in engine.step():
            assert result.error is None
            found[int(result.request_id), result.branch] += result.token_ids
    return [[found[i, b] for b in range(n)] for i in range(len(prompts))]


def replace_sampling(sampling: RowSampling, seed: int) -> RowSampling:
    return RowSampling(temperature=sampling.temperature, seed=seed)


@pytest.mark.parametrize("budget", [16, 17, 48, 64, 512])
def test_greedy_equals_transformers_for_every_chunk_size(
    checkpoint, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, prompts, answers = checkpoint
    engine = make_engine(directory, monkeypatch, budget=budget)
    for _ in range(2):  # the second time from the prefix cache
        assert [b[0] for b in generate(engine, prompts)] == answers
    assert engine.stats().num_cache_hits > 0
    engine.shutdown()


def test_logprobs_are_the_same_bits_for_every_chunk_size_and_run(
    checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, prompts, _ = checkpoint
    runs = []
    for budget in (16, 48, 48, 512):
        engine = make_engine(directory, monkeypatch, budget=budget)
        engine.scheduler.add(
            SequenceRequest(
                request_id="0",
                prompt_token_ids=prompts[0],
                sampling=RowSampling(temperature=0.0, num_logprobs=1, num_prompt_logprobs=1),
                max_tokens=NUM_TOKENS,
            )
        )
        found = []
        while engine.has_work:
            for result in engine.step():
                for entry in [*(result.prompt_logprobs or []), *(result.logprobs or [])]:
                    found.append((entry.token_ids, entry.logprobs))
        engine.shutdown()
        assert all(math.isfinite(value) for _, values in found for value in values)
        assert len(found) == len(prompts[0]) - 1 + NUM_TOKENS
        runs.append(found)
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("block_size", [1, 8, 32, 128])
def test_block_sizes(checkpoint, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, prompts, answers = checkpoint
    engine = make_engine(directory, monkeypatch, block_size=block_size, budget=100)
    assert [b[0] for b in generate(engine, prompts)] == answers
    engine.shutdown()


def test_preemption_changes_nothing(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, prompts, _ = checkpoint
    crowd = [prompts[4][i : i + 60 + i] for i in range(7)]
    runs = []
    for num_blocks in (None, 101):
        engine = make_engine(directory, monkeypatch, block_size=4, num_blocks=num_blocks)
        runs.append(generate(engine, crowd, RowSampling(temperature=1.0), n=2))
        preemptions = engine.stats().num_preemptions
        engine.shutdown()
    assert preemptions > 0
    assert runs[0] == runs[1]


def test_branches_share_the_prompt_and_differ_by_their_stream(
    checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, prompts, _ = checkpoint
    engine = make_engine(directory, monkeypatch)
    sampling = RowSampling(temperature=1.0)
    four = generate(engine, prompts, sampling, n=4)
    two = generate(engine, prompts, sampling, n=2)
    assert [b[:2] for b in four] == two, "a branch depends on n"
    assert all(len({tuple(b) for b in branches}) > 1 for branches in four)
    engine.shutdown()
