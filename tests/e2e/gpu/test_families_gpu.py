"""Every family on the GPU gives what it gives on the CPU.

float32: logprobs within 2e-3 and the same tokens but for near ties. bfloat16: as far from the CPU's
float32 as the CPU's bfloat16 is, which differs by family: weights are rounded alike, sums are not.
A step in a CUDA graph is the same bits as one that is not, with prompts in it, too, which are
captured where no prompt logprobs are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.gpu.engines import (
    WITH_PROMPTS,
    Answer,
    compare,
    generate,
    make_prompts,
    run_engine,
)
from tests.e2e.gpu.families import NAMES, write_checkpoint
from tests.e2e.gpu.rounding import check_rounding, measure_rounding
from vllm.worker import gpu_input_batch
from vllm.worker.prompt_size import PromptSize, find_prompt_size

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = 2e-3
PADDED_LENS = (13, 30, 9, 70)
"""Of prompts without prompt logprobs, so that their steps are padded on a GPU."""

PROMPT_STEPS: list[tuple[list[int], int]] = [
    ([13], 0),
    ([100, 300], 0),
    ([13] * 30, 0),
    ([300, 300], 0),
    ([20, 33, 1, 150, 64, 90], 2),
]
"""Lengths of prompts, and how many steps after each other they come; 0 is all at once."""

Run = Callable[..., list[Answer]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Answers of a family under flags; each asked for is made once."""
    root = tmp_path_factory.mktemp("families")
    made: dict[tuple[object, ...], list[Answer]] = {}

    def answer(name: str, device: str, **flags: object) -> list[Answer]:
        key = (name, device, *sorted(flags.items()))
        if key not in made:
            with run_engine(Path(write_checkpoint(name, root)), device, **flags) as engine:
                made[key] = [
                    *generate(engine, make_prompts(), sampling=WITH_PROMPTS),
                    *generate(engine, make_prompts(PADDED_LENS)),
                ]
        return made[key]

    return answer


@pytest.mark.parametrize("name", NAMES)
def test_float32_equals_the_cpu(run: Run, name: str) -> None:
    expected = run(name, "cpu", dtype="float32")
    found = run(name, "cuda", dtype="float32")
    agreed = [compare(a, b, TOLERANCE) for a, b in zip(found, expected, strict=True)]
    assert sum(agreed) >= 0.9 * sum(len(a.token_ids) for a in expected)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_rounds_as_the_cpu_does(run: Run, name: str) -> None:
    exact = run(name, "cpu", dtype="float32")
    cost = measure_rounding(run(name, "cpu", dtype="bfloat16"), exact)
    check_rounding(measure_rounding(run(name, "cuda", dtype="bfloat16"), exact), cost)


@pytest.mark.parametrize("name", NAMES)
def test_graph_equals_eager(run: Run, name: str) -> None:
    graph = run(name, "cuda", dtype="bfloat16")
    eager = run(name, "cuda", dtype="bfloat16", enforce_eager=True)
    for a, b in zip(graph, eager, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == b.logprobs


@pytest.mark.parametrize("name", NAMES)
def test_graph_equals_eager_with_prompts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of every size: one prompt, some, many, the rests of cut ones, beside decode rows."""
    sizes: list[PromptSize | None] = []

    def find(*args: Any) -> PromptSize | None:
        sizes.append(find_prompt_size(*args))
        return sizes[-1]

    monkeypatch.setattr(gpu_input_batch, "find_prompt_size", find)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    directory = Path(write_checkpoint(name, tmp_path))
    limits = {"max_model_len": 450, "max_num_seqs": 40, "max_num_batched_tokens": 512}
    found = []
    for enforce_eager in (False, True):
        with run_engine(
            directory, "cuda", dtype="bfloat16", enforce_eager=enforce_eager,
            num_gpu_blocks_override=2000, enable_prefix_caching=False, **limits,
        ) as engine:  # fmt: skip
            sizes.clear()
            answers = [
                generate(engine, make_prompts(lens), 8, gap=gap) for lens, gap in PROMPT_STEPS
            ]
            found.append((list(sizes), answers))
    assert found[0] == found[1]
    padded = [size for size in found[0][0] if size is not None]
    assert {size.num_decode_rows for size in padded} == {0, 16}
    assert {size.num_prompt_tokens for size in padded} >= {16, 128, 512}


@pytest.mark.parametrize("name", NAMES)
def test_overlap_changes_nothing(run: Run, name: str) -> None:
    overlapped = run(name, "cuda", dtype="bfloat16")
    alone = run(name, "cuda", dtype="bfloat16", steps=1)
    assert [a.token_ids for a in overlapped] == [a.token_ids for a in alone]
