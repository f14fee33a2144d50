"""Gemma 3 270M with prompts three of its windows long: hybrid, vanilla and transformers agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm import LLM, SamplingParams

DATA = Path(__file__).parents[1] / "data" / "gemma3_windows.json"
PROMPT_TOKENS = 1500


@pytest.mark.parametrize("hybrid_mode", [True, False], ids=["hybrid", "vanilla"])
def test_answers_are_those_of_transformers(gemma3_gguf: Path, hybrid_mode: bool) -> None:
    """64 greedy tokens in float32; where the two best logits nearly tie, either is right."""
    rows = json.loads(DATA.read_text())["prompts"]
    llm = LLM(str(gemma3_gguf), dtype="float32", max_model_len=1600, hybrid_mode=hybrid_mode)
    assert len(llm.llm_engine.stats().cache_groups) == (2 if hybrid_mode else 1)
    prompts = [{"prompt_token_ids": row["prompt_ids"]} for row in rows]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.shutdown()
    for row, output in zip(rows, outputs, strict=True):
        assert len(row["prompt_ids"]) == PROMPT_TOKENS
        ids = list(output.outputs[0].token_ids)
        pairs = enumerate(zip(ids, row["ids"], strict=True))
        first_other = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        assert first_other is None or row["gaps"][first_other] < 1e-3
