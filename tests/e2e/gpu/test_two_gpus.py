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
NAMES = ("llama", "gemma3", "qwen3_next_experts", "deepseek_v2", "nemotron_h_dense")
NUM_TOKENS = 16


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in (3, 30, 80)]


def answer(folder: Path, **flags: object) -> list[Answer]:
    with run_engine(folder, "cuda", dtype="float32", **flags) as engine:
        return generate(engine, make_prompts(), NUM_TOKENS)


def count_agreed(found: Sequence[Answer], expected: Sequence[Answer]) -> int:
    return sum(compare(a, b, 2e-3) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_answer_as_one_does(name: str, tmp_path: Path) -> None:
    folder = Path(write_checkpoint(name, tmp_path))
    alone = answer(folder)
    for eager in (False, True) if name == NAMES[0] else (False,):
        both = answer(folder, tensor_parallel_size=2, enforce_eager=eager)
        assert count_agreed(both, alone) >= 0.9 * NUM_TOKENS * len(alone)
