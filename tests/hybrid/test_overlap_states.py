"""Models with states: overlapped steps change no token and no checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.hybrid.models.test_qwen3_next import ROWS
from tests.hybrid.models.tiny import make_checkpoint
from tests.utils.fixtures_models import make_reach_prompt
from tests.utils.overlap import assert_same, run_engine, serve
from vllm import LLMEngine, SamplingParams

FLAGS: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 400, "hybrid_mode": True}
CONDITIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 6},
    "small_cache": {"num_gpu_blocks_override": 48, "max_num_seqs": 8},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-Next with a full layer in each pair."""
    return make_checkpoint(ROWS["dense"], tmp_path_factory.mktemp("states")).directory


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **fields})


def make_requests() -> dict[str, tuple[list[int], SamplingParams]]:
    """Prompts with common beginnings, longer and shorter than the grain of 64 tokens."""
    stem = make_reach_prompt(150, seed=1)
    requests = {
        f"greedy{n}": (stem[:n] + make_reach_prompt(1 + n % 7, seed=n), greedy())
        for n in (3, 63, 64, 65, 127, 128, 140)
    }
    drawn = {"temperature": 1.0, "max_tokens": 70, "seed": 5}
    requests["drawn"] = (stem[:100], SamplingParams(**drawn))
    requests["three"] = (stem[:90], SamplingParams(n=3, **drawn))
    requests["penalties"] = (stem[:70], greedy(repetition_penalty=1.3))
    return requests


def converse(engine: LLMEngine, num_turns: int, **ends: Any) -> list[tuple[list[int], int]]:
    """Let one talk grow; returns the answer of each turn and how much of its prompt was cached."""
    talk = make_reach_prompt(60, seed=2)
    turns = []
    for turn in range(num_turns):
        params = greedy(max_tokens=75, **ends)
        (output,) = serve(engine, {f"turn{turn}": (talk, params)}).values()
        answer = list(output.outputs[0].token_ids)
        turns.append((answer, output.num_cached_tokens or 0))
        talk = [*talk, *answer, *make_reach_prompt(5, seed=turn)]
    return turns


@pytest.fixture(scope="module")
def wanted(model: Path) -> Any:
    """The answers without overlap, and those to requests that end early."""
    requests = make_requests()
    with run_engine(model, 1, **FLAGS) as engine:
        found = serve(engine, requests)
        for n in (63, 64, 128):
            said = found[f"greedy{n}"].outputs[0].token_ids
            for place in (1, 20):
                requests[f"stop{n}at{place}"] = (
                    requests[f"greedy{n}"][0],
                    greedy(stop_token_ids=[said[place]]),
                )
        return requests, serve(engine, requests)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_same_answers(condition: str, model: Path, wanted: Any) -> None:
    requests, answers = wanted
    with run_engine(model, 2, **FLAGS, **CONDITIONS[condition]) as engine:
        for _ in range(2):  # the second time from checkpoints
            assert_same(serve(engine, requests), answers)
        assert engine._core.scheduler.stats().num_prefix_hit_tokens > 0


@pytest.mark.parametrize("seed", range(3))
def test_aborts_leave_no_wrong_checkpoint(seed: int, model: Path, wanted: Any) -> None:
    requests, answers = wanted
    rng = random.Random(seed)
    free = {name: request for name, request in requests.items() if name != "penalties"}
    with run_engine(model, 2, **FLAGS, **CONDITIONS["small_cache"]) as engine:
        serve(engine, free, aborts=rng)
        assert_same(serve(engine, free), answers)


def test_a_talk_is_resumed_where_it_is_without_overlap(model: Path) -> None:
    talks = []
    for steps in (1, 2):
        with run_engine(model, steps, **FLAGS) as engine:
            talks.append(converse(engine, 4))
    assert talks[0] == talks[1]
    assert all(num_cached >= 64 for _, num_cached in talks[0][1:])


def test_a_turn_that_ends_by_itself_is_resumed(model: Path) -> None:
    """The over-run has consumed the last token, which is part of the next prompt."""
    with run_engine(model, 1, **FLAGS) as engine:
        ((said, _),) = converse(engine, 1)
    for place in (2, 3, 4, 40, 67):  # prompt 60: consumed 63, 64, 65, 101 and 128 tokens
        ends = {"stop_token_ids": [said[place]]}
        talks = []
        for steps in (1, 2):
            with run_engine(model, steps, **FLAGS) as engine:
                talks.append(converse(engine, 3, **ends))
        assert [answer for answer, _ in talks[0]] == [answer for answer, _ in talks[1]]
        assert talks[1][2][1] >= talks[0][2][1]
