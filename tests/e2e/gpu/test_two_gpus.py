"""Two GPUs give what one gives: tensor parallel ranks over NCCL, with graphs and without.

float32: logprobs within 2e-3 and the same tokens but for near ties. An engine of ranks takes about
seven seconds to start, so that one family alone does without graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.e2e.gpu.engines import Answer, compare, generate, run_engine
from tests.e2e.gpu.families import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"
    ),
]
NUM_TOKENS = 16


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in (3, 30, 80)]


def answer(folder: Path, **flags: object) -> list[Answer]:
    with run_engine(folder, "cuda", dtype="float32", **flags) as engine:
        return generate(engine, make_prompts(), NUM_TOKENS)


def count_agreed(found: Sequence[Answer], expected: Sequence[Answer]) -> int:
    return sum(compare(a, b, 2e-3) for a, b in zip(found, expected, strict=True))


def check_two_ranks(name: str, root: Path, *ways: bool) -> None:
    """Compare two ranks with one, once for each word whether graphs are left out."""
    folder = Path(write_checkpoint(name, root))
    alone = answer(folder)
    for enforce_eager in ways:
        both = answer(folder, tensor_parallel_size=2, enforce_eager=enforce_eager)
        assert count_agreed(both, alone) >= 0.9 * NUM_TOKENS * len(alone)


@pytest.mark.parametrize(("name", "ways"), [("llama", (False, True)), ("gemma3", (False,))])
def test_two_ranks_answer_as_one_does(name: str, ways: tuple[bool, ...], tmp_path: Path) -> None:
    check_two_ranks(name, tmp_path, *ways)
