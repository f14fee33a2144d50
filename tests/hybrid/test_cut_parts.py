"""Tokens that upper layers leave out, beside products that stay in parts: the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hybrid.engines import run_engine
from tests.hybrid.test_cuts import answer, ask, count_tokens
from tests.utils.fixtures_models import build_reach, make_reach_prompt, save_checkpoint
from tests.utils.product_parts import leave_parts

LENS = (700, 40, 513)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build_reach(
        "qwen3",
        hidden_size=1280,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=20,
        max_window_layers=2,
        max_position_embeddings=1024,
    )
    return save_checkpoint(model, tmp_path_factory.mktemp("windows_above"))


def run(checkpoint: Path, *, finish: bool) -> tuple[Any, ...]:
    requests = [ask(str(i), make_reach_prompt(n, seed=n)) for i, n in enumerate(LENS)]
    requests.append(ask("scored", make_reach_prompt(300, seed=3), num_prompt_logprobs=1))
    flags = {"dtype": "bfloat16", "max_model_len": 900, "max_num_batched_tokens": 1024}
    with (
        leave_parts(3, finish=finish) as found,
        count_tokens() as tokens,
        run_engine(checkpoint, **flags) as engine,
    ):
        return answer(engine, requests), tokens, found


def test_answers_are_the_same(checkpoint: Path) -> None:
    in_parts, tokens, found = run(checkpoint, finish=False)
    whole, same_tokens, none = run(checkpoint, finish=True)
    assert tokens == same_tokens
    assert tokens[3] < tokens[2] < tokens[0], "upper layers leave tokens out"
    assert found["norm"] > found["qkv"] > 0
    assert not none
    assert in_parts == whole
