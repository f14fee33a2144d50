"""Two GPUs give what one gives: families that only hybrid mode serves, see `tests/e2e/gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.gpu import test_two_gpus
from tests.e2e.gpu.test_two_gpus import check_two_ranks

pytestmark = test_two_gpus.pytestmark


@pytest.mark.parametrize("name", ["qwen3_next_experts", "deepseek_v2", "nemotron_h_dense"])
def test_two_ranks_answer_as_one_does(name: str, tmp_path: Path) -> None:
    check_two_ranks(name, tmp_path, False)
