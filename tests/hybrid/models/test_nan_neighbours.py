"""One sequence computes NaN: its neighbours and those who get its blocks do not notice (trap 1)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.hybrid.models import (
    test_gemma3n,
    test_gpt_oss,
    test_lfm2,
    test_llama4,
    test_nemotron_h,
    test_qwen3_next,
)
from tests.hybrid.models.checks import make_driver
from tests.hybrid.models.tiny import TinyCheckpoint, TinyRow, make_checkpoint
from tests.models.compare import make_prompts

BAD_TOKEN = 310
NUM_GOOD_TOKENS = 300  # of tied weights the bad token's own logit is NaN everywhere
ROWS: dict[str, TinyRow] = {
    "gemma3n": test_gemma3n.ROW,
    "gpt_oss": test_gpt_oss.ROW,
    "lfm2": test_lfm2.ROWS["dense"],
    "llama4": test_llama4.ROW,
    "nemotron_h": test_nemotron_h.ROWS["experts"],
    "qwen3_next": test_qwen3_next.ROWS["dense"],
}


def spoil(checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    """Let one token begin as NaN, and no cap hide what becomes of it."""
    config = {**checkpoint.config, "final_logit_softcapping": 0.0}
    weights = dict(checkpoint.weights)
    (name,) = (n for n in weights if n.endswith(("embed_tokens.weight", "embeddings.weight")))
    weights[name] = weights[name].clone()
    weights[name][BAD_TOKEN] = torch.nan
    return replace(checkpoint, config=config, weights=weights)


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
@pytest.mark.parametrize("name", ROWS)
def test_a_sequence_of_nan_harms_nobody(name: str, kernel: str, tmp_path: Path) -> None:
    driver = make_driver(spoil(make_checkpoint(ROWS[name], tmp_path)), kernel=kernel)
    (prompt,) = make_prompts((45,))

    def check(logits: Tensor) -> None:
        torch.testing.assert_close(logits[:, :NUM_GOOD_TOKENS], alone, rtol=0, atol=1e-4)

    (alone,) = driver.step({0: prompt}, all_logits=True)
    alone = alone[:, :NUM_GOOD_TOKENS]
    assert torch.isfinite(alone).all()
    first, _ = driver.step({1: prompt[:20], 2: [BAD_TOKEN] * 50}, all_logits=True)
    bad, rest = driver.step({2: [BAD_TOKEN], 1: prompt[20:]}, all_logits=True)
    assert bad.isnan().all(), "else this proves nothing"
    check(torch.cat((first, rest)))
    driver.free(2)
    (after,) = driver.step({3: prompt}, all_logits=True)  # in the blocks of the bad one
    check(after)
