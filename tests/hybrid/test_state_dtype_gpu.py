"""States of 16 bits on the GPU cost no more than weights and activations of 16 bits do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.gpu.engines import WITH_PROMPTS, Answer, generate, make_prompts, run_engine
from tests.e2e.gpu.families import NAMES, write_checkpoint
from tests.e2e.gpu.rounding import check_rounding, measure_rounding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = [next(n for n in NAMES if n.startswith(f)) for f in ("nemotron_h", "qwen3_next")]


@pytest.mark.parametrize("name", FAMILIES)
def test_states_of_16_bits(name: str, tmp_path: Path) -> None:
    """Prompts are cut over several steps, so that states are rounded between them too."""
    model = write_checkpoint(name, tmp_path)

    def answer(device: str, **flags: Any) -> list[Answer]:
        with run_engine(model, device, **flags) as engine:
            return generate(engine, make_prompts(), sampling=WITH_PROMPTS)

    exact = answer("cpu", dtype="float32")
    cost = measure_rounding(answer("cpu", dtype="bfloat16"), exact)
    plain = measure_rounding(answer("cuda", dtype="float32"), exact)
    for kept in ("bfloat16", "float16"):
        found = answer("cuda", dtype="float32", mamba_ssm_cache_dtype=kept)
        rounding = measure_rounding(found, exact)
        check_rounding(rounding, cost)
        assert rounding.typical > plain.typical, "states were rounded"
