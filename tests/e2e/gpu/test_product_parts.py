"""Products that stay in parts until the next op adds them up: on a GPU, beside whole products.

A step in a CUDA graph is the same bits as one that is not. With parts and without, answers round
alike: sums over K are cut at other places.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.e2e.gpu.engines import WITH_PROMPTS, Answer, generate, make_prompts, run_engine
from tests.e2e.gpu.rounding import check_rounding, measure_rounding
from tests.models.families import randomize
from tests.utils.fixtures_models import build_model
from vllm.model_executor.layers import linear as linear_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BASE = {
    "vocab_size": 320,
    "hidden_size": 1280,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = ("qwen2", "qwen3", "gemma")
"""A bias of the projection, norms of heads, float32 weights of norms."""

FEW, MANY = 3, 12
"""Numbers of parts that the ops behind add up on their way, and by a launch of its own."""

Count = Callable[[int, int, int, torch.device], int]
Run = Callable[..., list[Answer]]


def leave_none(*_shape: object) -> int:
    return 0


def leave(num_parts: int, num_rows: int, num_outputs: int, k: int, device: torch.device) -> int:
    """Return so many parts for few rows, whatever is fastest."""
    return num_parts if device.type == "cuda" else 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Answers of a model under flags; each asked for is made once."""
    root = tmp_path_factory.mktemp("parts")
    made: dict[tuple[object, ...], list[Answer]] = {}

    def answer(name: str, device: str, num_parts: int, **flags: object) -> list[Answer]:
        key = (name, device, num_parts, *sorted(flags.items()))
        if key in made:
            return made[key]
        directory = root / name
        if not directory.exists():
            config = {**BASE, "head_dim": 128} if name != "qwen2" else BASE
            model = build_model(name, config)
            with torch.no_grad():
                for parameter in randomize(model).parameters():
                    if parameter.dim() >= 2:
                        parameter.mul_(0.3)  # sums over 1,280 of them would drown the rest
            model.save_pretrained(directory)
        with pytest.MonkeyPatch.context() as patch:
            count: Count = partial(leave, num_parts) if num_parts else leave_none
            patch.setattr(linear_layers, "count_parts", count)
            with run_engine(Path(directory), device, **flags) as engine:
                made[key] = [
                    *generate(engine, make_prompts(), sampling=WITH_PROMPTS),
                    *generate(engine, make_prompts((13, 30, 9))),
                ]
        return made[key]

    return answer


@pytest.mark.parametrize(
    ("name", "num_parts"), [*((name, FEW) for name in MODELS), ("qwen3", MANY)]
)
def test_rounds_as_whole_products_do(run: Run, name: str, num_parts: int) -> None:
    exact = run(name, "cpu", 0, dtype="float32")
    whole = measure_rounding(run(name, "cuda", 0, dtype="bfloat16"), exact)
    in_parts = measure_rounding(run(name, "cuda", num_parts, dtype="bfloat16"), exact)
    check_rounding(in_parts, whole)


@pytest.mark.parametrize("name", MODELS)
def test_graph_equals_eager(run: Run, name: str) -> None:
    graph = run(name, "cuda", FEW, dtype="bfloat16")
    eager = run(name, "cuda", FEW, dtype="bfloat16", enforce_eager=True)
    for a, b in zip(graph, eager, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == b.logprobs
        assert a.prompt_logprobs == b.prompt_logprobs


def test_parts_are_left(run: Run) -> None:
    """The patch above reaches the layers: other numbers of parts are other bits."""
    answers = [run("qwen3", "cuda", n, dtype="bfloat16") for n in (0, FEW, MANY)]
    logprobs = [[a.logprobs for a in of_count] for of_count in answers]
    assert logprobs[0] != logprobs[1] != logprobs[2]
