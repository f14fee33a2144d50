"""Two real models from their GGUF files, against what transformers answers from the same files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm import LLM, SamplingParams

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def case(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, dict[str, Any]]]:
    """A model in float32, and the recorded answers."""
    path = request.getfixturevalue(f"{request.param}_gguf")
    recorded = json.loads((DATA / f"{request.param}_greedy.json").read_text())
    llm = LLM(str(path), dtype="float32", max_model_len=1024, max_num_seqs=16)
    yield llm, recorded
    llm.llm_engine.shutdown()


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **fields)


def test_recorded_prompts(case: tuple[LLM, dict[str, Any]]) -> None:
    llm, recorded = case
    rows = recorded["prompts"]
    params = [greedy(max_tokens=len(r["ids"]), logprobs=5, skip_special_tokens=False,
                     include_stop_str_in_output=True) for r in rows]  # fmt: skip
    prompts = [
        r["prompt"] if r["kind"] == "text" else {"prompt_token_ids": r["prompt_ids"]} for r in rows
    ]
    for row, output in zip(rows, llm.generate(prompts, params, use_tqdm=False), strict=True):
        answer = output.outputs[0]
        assert output.prompt_token_ids == row["prompt_ids"]
        assert list(answer.token_ids) == row["ids"]
        assert answer.text == row["text"]
        for token, value in row["next_top5"]:
            assert answer.logprobs[0][token].logprob == pytest.approx(value, abs=1e-3)


def test_recorded_chats(case: tuple[LLM, dict[str, Any]]) -> None:
    llm, recorded = case
    chats = [r for r in recorded["prompts"] if r["kind"] == "chat"]
    if not chats:
        pytest.skip("a base model has no chat template")
    outputs = llm.chat(
        [[{"role": "user", "content": r["prompt"]}] for r in chats],
        [greedy(max_tokens=len(r["ids"])) for r in chats],
        use_tqdm=False,
    )
    for row, output in zip(chats, outputs, strict=True):
        assert output.prompt == row["rendered"]
        assert output.prompt_token_ids == row["prompt_ids"]
        assert list(output.outputs[0].token_ids) == row["ids"]
        assert output.num_cached_tokens is not None


def test_a_long_prompt_in_chunks(case: tuple[LLM, dict[str, Any]]) -> None:
    llm, recorded = case
    long = recorded["long"]
    prompt = {"prompt_token_ids": long["prompt_ids"]}
    (scored,) = llm.generate(prompt, greedy(max_tokens=20, prompt_logprobs=0), use_tqdm=False)
    assert list(scored.outputs[0].token_ids) == long["first20"]
    values = [
        entry[token].logprob
        for token, entry in zip(long["prompt_ids"][1:], scored.prompt_logprobs[1:], strict=True)
    ]
    assert -sum(values) / len(values) == pytest.approx(long["mean_nll"], abs=1e-4)
    (again,) = llm.generate(prompt, greedy(max_tokens=20), use_tqdm=False)
    assert again.num_cached_tokens >= 880
    assert list(again.outputs[0].token_ids) == long["first20"]


def test_ten_longer_prompts(
    case: tuple[LLM, dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    """Up to 900 tokens of prompt, as `tools/record_greedy.py` recorded them from transformers."""
    name = request.node.callspec.params["case"]
    rows = json.loads((DATA / f"{name}_long.json").read_text())["prompts"]
    prompts = [{"prompt_token_ids": row["prompt_ids"]} for row in rows]
    params = greedy(max_tokens=len(rows[0]["ids"]), ignore_eos=True)
    for row, output in zip(rows, case[0].generate(prompts, params, use_tqdm=False), strict=True):
        ids = list(output.outputs[0].token_ids)
        pairs = enumerate(zip(ids, row["ids"], strict=True))
        first_other = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        # Two best logits within 1e-3: either is right, and the rest no longer compares.
        assert first_other is None or row["gaps"][first_other] < 1e-3


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_bfloat16_answers_do_not_depend_on_the_batch(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Alone, in batches of 3, 8 and 32, in chunks of 16, 64 and 512: the same tokens."""
    path = request.getfixturevalue(f"{name}_gguf")
    rows = json.loads((DATA / f"{name}_greedy.json").read_text())["prompts"]
    prompts = [{"prompt_token_ids": r["prompt_ids"]} for r in rows]
    params = greedy(max_tokens=16, ignore_eos=True)
    answers: dict[int, set[tuple[int, ...]]] = {i: set() for i in range(len(rows))}
    for chunk in (16, 64, 512):
        llm = LLM(
            str(path), dtype="bfloat16", max_model_len=256, max_num_batched_tokens=chunk,
            max_num_seqs=min(chunk, 32), enable_prefix_caching=False,
        )  # fmt: skip
        for size in (1, 3, 8, 32):
            batch = [i % len(rows) for i in range(size if size > 1 else 8)]
            groups = [[i] for i in batch] if size == 1 else [batch]
            for group in groups if chunk == 512 else groups[:2]:
                outputs = llm.generate([prompts[i] for i in group], params, use_tqdm=False)
                for i, output in zip(group, outputs, strict=True):
                    answers[i].add(tuple(output.outputs[0].token_ids))
        llm.llm_engine.shutdown()
    assert {i: len(found) for i, found in answers.items()} == dict.fromkeys(range(len(rows)), 1)
