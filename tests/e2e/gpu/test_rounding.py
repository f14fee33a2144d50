"""The yardstick for bfloat16: it lets rounding pass, and no mistake that is larger."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.gpu.engines import WITH_PROMPTS, Answer, generate, make_prompts, run_engine
from tests.e2e.gpu.families import write_checkpoint
from tests.e2e.gpu.rounding import Rounding, check_rounding, measure_rounding

NAME = "llama_tied_biased"


def answer(directory: Path, dtype: str) -> list[Answer]:
    with run_engine(directory, "cpu", dtype=dtype) as engine:
        return generate(engine, make_prompts(), sampling=WITH_PROMPTS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(NAME, tmp_path_factory.mktemp("rounding"))


@pytest.fixture(scope="module")
def exact(checkpoint: Path) -> list[Answer]:
    return answer(checkpoint, "float32")


@pytest.fixture(scope="module")
def cost(checkpoint: Path, exact: Sequence[Answer]) -> Rounding:
    return measure_rounding(answer(checkpoint, "bfloat16"), exact)


def test_float32_costs_nothing(exact: Sequence[Answer], cost: Rounding) -> None:
    nothing = measure_rounding(exact, exact)
    assert nothing == Rounding(typical=0.0, largest=0.0, widest_tie=0.0)
    assert 0.005 < cost.typical < 0.05
    check_rounding(cost, cost)
    with pytest.raises(AssertionError):
        check_rounding(cost, nothing)


@pytest.mark.parametrize(
    ("tensor", "factor"),
    [
        ("model.layers.1.self_attn.q_proj.bias", 0.0),
        ("model.layers.1.self_attn.v_proj.bias", 0.0),
        ("model.layers.2.mlp.down_proj.bias", 0.0),
        ("model.layers.1.input_layernorm.weight", 1.02),
    ],
)
def test_a_wrong_weight_is_seen(
    checkpoint: Path,
    exact: Sequence[Answer],
    cost: Rounding,
    tmp_path: Path,
    tensor: str,
    factor: float,
) -> None:
    wrong = Path(shutil.copytree(checkpoint, tmp_path / NAME))
    weights = load_file(wrong / "model.safetensors")
    weights[tensor] *= factor
    save_file(weights, wrong / "model.safetensors", metadata={"format": "pt"})
    found = measure_rounding(answer(wrong, "bfloat16"), exact)
    with pytest.raises(AssertionError, match="beside"):
        check_rounding(found, cost)


def test_a_wrong_epsilon_is_seen(
    checkpoint: Path, exact: Sequence[Answer], cost: Rounding, tmp_path: Path
) -> None:
    wrong = Path(shutil.copytree(checkpoint, tmp_path / NAME))
    config = json.loads((wrong / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-6
    (wrong / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    found = measure_rounding(answer(wrong, "bfloat16"), exact)
    with pytest.raises(AssertionError, match="beside"):
        check_rounding(found, cost)


def test_positions_count_up_to_where_answers_part() -> None:
    ours = Answer(
        token_ids=[1, 2, 9],
        logprobs=[{1: -0.5, 3: -1.0}, {2: -0.7, 4: -0.8}, {9: -5.0}],
        prompt_logprobs=[{5: -2.0}],
    )
    reference = Answer(
        token_ids=[1, 4, 8],
        logprobs=[{1: -0.4, 3: -1.3}, {4: -0.6, 2: -0.65}, {8: -0.1}],
        prompt_logprobs=[{5: -2.1}],
    )
    found = measure_rounding([ours], [reference])
    assert found.typical == pytest.approx(0.2)
    assert found.largest == pytest.approx(0.3)
    assert found.widest_tie == pytest.approx(0.05)
