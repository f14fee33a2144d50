"""Which positions a token sees: cases C01, C02 and C03 at the level of the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.models.compare import assert_follows
from tests.models.families import load_ours, read_config
from tests.utils.fixtures_models import build_reach, change_token, make_reach_prompt
from tests.utils.paged_driver import PagedDriver
from vllm.errors import ConfigError
from vllm.model_executor.models.causal_lm import CausalLM

KERNEL = "cpu"
SEEN = 1e-5


def make_ours(reference: torch.nn.Module) -> CausalLM:
    # lm_head is in the state dict of a tied model too; a checkpoint file leaves it out.
    tied = reference.config.tie_word_embeddings
    weights = {k: v for k, v in reference.state_dict().items() if not (tied and "lm_head" in k)}
    return load_ours(read_config(reference), weights)


def find_reach(last_logits: Callable[[list[int]], Tensor], prompt: list[int]) -> set[int]:
    """Return the distances whose token moves the last position's logits."""
    base = last_logits(prompt)
    reach = set()
    for distance in range(1, len(prompt)):
        changed = list(prompt)
        changed[-1 - distance] = change_token(changed[-1 - distance])
        if (last_logits(changed) - base).abs().max() > SEEN:
            reach.add(distance)
    return reach


def run_chunks(driver: PagedDriver, prompt: list[int], sizes: list[int]) -> Tensor:
    """Feed a prompt in chunks of these sizes, the last repeated, and return the last logits."""
    start = 0
    sizes = list(sizes)
    while start < len(prompt):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        (logits,) = driver.step({0: prompt[start : start + size]})
        start += size
    driver.free(0)
    return logits


WHOLE, CHUNKS, DECODE = [1 << 20], [16], [65, 1]


@pytest.mark.parametrize("sizes", [WHOLE, CHUNKS, [7], DECODE], ids=["whole", "16", "7", "decode"])
@pytest.mark.parametrize(
    ("kinds", "reach"),
    [(["full_attention"], 79), (["sliding_attention"], 19)],
    ids=["full", "sliding"],
)
def test_c01_a_layer_typed_full_never_gets_the_window(
    kinds: list[str], reach: int, sizes: list[int]
) -> None:
    reference = build_reach("gemma3_text", layer_types=kinds, sliding_window=20)
    driver = PagedDriver(make_ours(reference), kernel=KERNEL)
    found = find_reach(lambda ids: run_chunks(driver, ids, sizes), make_reach_prompt())
    assert found == set(range(1, reach + 1))


@pytest.mark.parametrize("window", [20, 32])
@pytest.mark.parametrize("total", [80, 81, 95])
@pytest.mark.parametrize("sizes", [WHOLE, CHUNKS, DECODE], ids=["prefill", "chunked", "decode"])
def test_c02_a_window_is_exact_in_every_phase(window: int, total: int, sizes: list[int]) -> None:
    reference = build_reach("mistral", sliding_window=window)
    driver = PagedDriver(make_ours(reference), kernel=KERNEL)
    found = find_reach(lambda ids: run_chunks(driver, ids, sizes), make_reach_prompt(total))
    assert found == set(range(1, window))


GEMMA2 = {"sliding_window": 20, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


@pytest.mark.parametrize(("num_layers", "reach"), [(1, 19), (2, 79)])
def test_c03_the_first_layer_of_gemma2_slides_and_the_second_does_not(
    num_layers: int, reach: int
) -> None:
    reference = build_reach("gemma2", num_hidden_layers=num_layers, **GEMMA2)
    driver = PagedDriver(make_ours(reference), kernel=KERNEL)
    found = find_reach(lambda ids: run_chunks(driver, ids, WHOLE), make_reach_prompt())
    assert found == set(range(1, reach + 1))


def test_c03_gemma2_follows_the_reference_over_several_windows() -> None:
    reference = build_reach("gemma2", num_hidden_layers=2, **GEMMA2)
    driver = PagedDriver(make_ours(reference), kernel=KERNEL)
    prompts = [make_reach_prompt()]
    assert_follows(reference, prompts, driver.generate(prompts, 40))


@pytest.mark.parametrize(("use", "first", "reach"), [(True, 0, 19), (True, 1, 79), (False, 0, 79)])
def test_qwen2_windows_follow_the_switch_and_the_first_layer(
    use: bool, first: int, reach: int
) -> None:
    reference = build_reach(
        "qwen2",
        sliding_window=20,
        use_sliding_window=use,
        max_window_layers=first,
    )
    driver = PagedDriver(make_ours(reference), kernel=KERNEL)
    found = find_reach(lambda ids: run_chunks(driver, ids, WHOLE), make_reach_prompt())
    assert found == set(range(1, reach + 1))


@pytest.mark.parametrize(("kind", "reach"), [("full_attention", 79), ("sliding_attention", 19)])
def test_mistral_obeys_layer_types_where_they_are_given(kind: str, reach: int) -> None:
    reference = build_reach("mistral", sliding_window=20)
    config = {**read_config(reference), "layer_types": [kind]}
    driver = PagedDriver(load_ours(config, reference.state_dict()), kernel=KERNEL)
    found = find_reach(lambda ids: run_chunks(driver, ids, WHOLE), make_reach_prompt())
    assert found == set(range(1, reach + 1))


def test_other_layer_types_and_windows_without_a_size_are_refused() -> None:
    reference = build_reach("mistral", sliding_window=20)
    config, weights = read_config(reference), reference.state_dict()
    with pytest.raises(ConfigError, match="layer 0 has layer type 'chunked_attention'"):
        load_ours({**config, "layer_types": ["chunked_attention"]}, weights)
    sliding = {**config, "layer_types": ["sliding_attention"], "sliding_window": None}
    with pytest.raises(ConfigError, match="sliding_window is None"):
        load_ours(sliding, weights)
