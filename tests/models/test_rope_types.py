"""Llama with every rope type against transformers, on both sides of the trained length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.model_executor.layers.test_rotary_embedding import LONG, SETTINGS, SHORT
from tests.models.compare import assert_follows, make_prompts
from tests.models.families import FAMILIES, load_ours, randomize, read_config
from tests.utils.fixtures_models import build_model
from tests.utils.paged_driver import PagedDriver
from vllm.model_executor.models.causal_lm import CausalLM

KERNEL = "cpu"


def make_pair(
    settings: dict[str, Any], max_positions: int, max_model_len: int
) -> tuple[Any, CausalLM]:
    config = {
        **FAMILIES["llama"].config,
        "max_position_embeddings": max_positions,
        "rope_parameters": {"rope_theta": 10_000.0, **settings},
    }
    reference = randomize(build_model("llama", config))
    ours = load_ours(read_config(reference), reference.state_dict(), max_model_len=max_model_len)
    return reference, ours


@pytest.mark.parametrize("name", [name for name in SETTINGS if not name.startswith("longrope")])
def test_every_type_follows_transformers(name: str) -> None:
    reference, ours = make_pair(SETTINGS[name], 512, 512)
    prompts = make_prompts((3, 60, 150))
    driver = PagedDriver(ours, kernel=KERNEL)
    assert_follows(reference, prompts, driver.generate(prompts, 16, chunk_tokens=50))


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(("max_model_len", "lengths"), [(64, (3, 40)), (512, (65, 150))])
def test_longrope_follows_transformers_on_the_side_that_the_engine_serves(
    max_model_len: int, lengths: tuple[int, ...]
) -> None:
    reference, ours = make_pair(LONGROPE, 512, max_model_len)
    prompts = make_prompts(lengths)
    driver = PagedDriver(ours, kernel=KERNEL)
    made = driver.generate(prompts, 16)
    assert_follows(reference, prompts, made)


def test_dynamic_grows_as_transformers_does_with_a_cache() -> None:
    """From the trained length on, each new token turns as in a sequence that ends with it."""
    reference, ours = make_pair(SETTINGS["dynamic"], 64, 128)
    (prompt,) = make_prompts((60,))
    (made,) = PagedDriver(ours, kernel=KERNEL).generate([prompt], 40)
    cache = None
    ids = torch.tensor([prompt])
    for token, logits in zip(made.token_ids, made.logits, strict=True):
        with torch.inference_mode():
            out = reference(ids, cache=cache, use_cache=True)
        torch.testing.assert_close(logits, out.logits[0, -1], rtol=0, atol=1e-4)
        cache, ids = out.past_key_values, torch.tensor([[token]])
