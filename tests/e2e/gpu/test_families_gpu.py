"""Every family on the GPU gives what it gives on the CPU.

float32: logprobs within 2e-3 and the same tokens but for near ties. bfloat16 against the CPU's
float32: logprobs within 0.25 (weights are rounded alike, sums are not). A step in a CUDA graph is
the same bits as one that is not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.e2e.gpu.engines import Answer, compare, generate, run_engine
from tests.e2e.gpu.families import NAMES, write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = (1, 17, 40, 90)
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.25}

Run = Callable[..., list[Answer]]


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Answers of a family under flags; each asked for is made once."""
    root = tmp_path_factory.mktemp("families")
    made: dict[tuple[object, ...], list[Answer]] = {}

    def answer(name: str, device: str, **flags: object) -> list[Answer]:
        key = (name, device, *sorted(flags.items()))
        if key not in made:
            with run_engine(Path(write_checkpoint(name, root)), device, **flags) as engine:
                made[key] = generate(engine, make_prompts())
        return made[key]

    return answer


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_cpu(run: Run, name: str, dtype: str) -> None:
    expected = run(name, "cpu", dtype="float32")
    found = run(name, "cuda", dtype=dtype)
    agreed = [compare(a, b, TOLERANCE[dtype]) for a, b in zip(found, expected, strict=True)]
    if dtype == "float32":
        assert sum(agreed) >= 0.9 * 16 * len(LENGTHS)


@pytest.mark.parametrize("name", NAMES)
def test_graph_equals_eager(run: Run, name: str) -> None:
    graph = run(name, "cuda", dtype="bfloat16")
    eager = run(name, "cuda", dtype="bfloat16", enforce_eager=True)
    for a, b in zip(graph, eager, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == b.logprobs


@pytest.mark.parametrize("name", NAMES)
def test_overlap_changes_nothing(run: Run, name: str) -> None:
    overlapped = run(name, "cuda", dtype="bfloat16")
    alone = run(name, "cuda", dtype="bfloat16", steps=1)
    assert [a.token_ids for a in overlapped] == [a.token_ids for a in alone]
