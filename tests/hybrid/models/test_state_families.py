"""Families whose layers keep a state, against transformers; chunks, batches, reused states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.hybrid.models.checks import check_against_transformers, check_ways_of_computing
from tests.hybrid.models.tiny import BASE, TinyCheckpoint, TinyRow, make_checkpoint
from tests.models.compare import make_prompts, reference_logits
from tests.models.families import load_ours
from tests.utils.paged_driver import PagedDriver

_DELTA_NET = {
    **BASE,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}

ROWS: dict[str, TinyRow] = {
    "qwen3_next": TinyRow(
        model_type="qwen3_next",
        config={**_DELTA_NET, **_EXPERTS, "mlp_only_layers": [1], "attention_bias": True},
    ),
    "qwen3_5": TinyRow(model_type="qwen3_5_text", config=_DELTA_NET),
    "qwen3_5_moe": TinyRow(model_type="qwen3_5_moe_text", config={**_DELTA_NET, **_EXPERTS}),
}

Get = Callable[[str], TinyCheckpoint]


@pytest.fixture(scope="module")
def get(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """Checkpoints by row, made on first use."""
    made: dict[str, TinyCheckpoint] = {}

    def get_one(name: str) -> TinyCheckpoint:
        if name not in made:
            made[name] = make_checkpoint(ROWS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get_one


@pytest.mark.parametrize("name", ROWS)
def test_equals_transformers(name: str, get: Get) -> None:
    check_against_transformers(get(name), ROWS[name].prompt_lens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ROWS)
def test_the_same_bits_in_chunks_and_batches(name: str, dtype: torch.dtype, get: Get) -> None:
    check_ways_of_computing(get(name), 70, dtype=dtype)


@pytest.mark.parametrize("name", ROWS)
def test_short_prompts_in_reused_blocks(name: str, get: Get) -> None:
    """Prompts shorter than a filter, in every cut, over blocks that another sequence left as NaN."""
    made = get(name)
    model = load_ours(made.config, made.weights)
    driver = PagedDriver(model, num_blocks=1, kernel="cpu", poison_freed=True)
    for length in range(1, 7):
        (prompt,) = make_prompts((length,))
        expected = reference_logits(made.reference, prompt)
        for cut in range(length):
            parts = [part for part in (prompt[:cut], prompt[cut:]) if part]
            logits = torch.cat([driver.step({0: part}, all_logits=True)[0] for part in parts])
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
            driver.free(0)
