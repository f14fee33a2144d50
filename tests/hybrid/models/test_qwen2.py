"""Qwen 2 whose layers have types: named by the user, windows from `max_window_layers` on.

Cases C01 to C03 for each type of layer, in caches that keep what the type says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hybrid.models.forgetting import ForgettingDriver, limit_model
from tests.models.compare import assert_follows, make_prompts
from tests.models.families import load_ours, make_reference, read_config
from tests.models.test_windows import CHUNKS, DECODE, WHOLE, find_reach, run_chunks
from tests.utils.fixtures_models import build_reach, make_reach_prompt
from vllm.cache_spec import Full, Window
from vllm.config.hybrid import HybridConfig
from vllm.model_executor.models.causal_lm import CausalLM

SIZES = pytest.mark.parametrize(
    "sizes", [WHOLE, CHUNKS, [7], DECODE], ids=["whole", "16", "7", "decode"]
)
REACH_LEN = 400


def make_reach(
    changes: Mapping[str, Any], hybrid: HybridConfig, *, model_type: str = "qwen2"
) -> CausalLM:
    """Return FX-REACH of one layer under a hybrid configuration."""
    reference = build_reach(model_type, **changes)
    config = read_config(reference)
    model = load_ours(config, read_weights(reference, config))
    return limit_model(model, config, hybrid, REACH_LEN)


def read_weights(reference: torch.nn.Module, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint file has: a tied output matrix is not among them."""
    is_tied = config["tie_word_embeddings"]
    state = reference.state_dict()
    return {k: v for k, v in state.items() if not (is_tied and k == "lm_head.weight")}


def measure(model: CausalLM, sizes: list[int]) -> set[int]:
    driver = ForgettingDriver(model, kernel="cpu")
    return find_reach(lambda ids: run_chunks(driver, ids, sizes), make_reach_prompt())


def name_layers(ratio: float | None = None, sinks: int = 0) -> HybridConfig:
    """Return the configuration of a model of one layer, whose type is called "near"."""
    return HybridConfig(
        enabled=True,
        layers={"near": (0,)},
        kv_cache_ratio={} if ratio is None else {"near": ratio},
        kv_sink_tokens={"near": sinks} if sinks else {},
    )


def test_the_users_types_over_the_checkpoints_windows_equal_transformers() -> None:
    """Layers 1 and 2 slide; a type holds layers of both kinds, another one of them."""
    reference = make_reference("qwen2_window")
    config = read_config(reference)
    config["hybrid_attention_layers"] = {"near": [0, 2], "far": [1]}
    model = limit_model(load_ours(config, read_weights(reference, config)), config)
    found = [(spec.kind, spec.lifetime) for spec in model.cache_specs()]
    window = Window(tokens=20)
    assert found == [("near", Full()), ("far", window), ("near", window)]
    prompts = make_prompts((1, 19, 20, 21, 60))
    driver = ForgettingDriver(model, kernel="cpu", poison_freed=True)
    assert_follows(reference, prompts, driver.generate(prompts, 40, chunk_tokens=17))


@SIZES
def test_c01_a_full_layer_of_a_named_type_keeps_everything(sizes: list[int]) -> None:
    changes = {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1}
    model = make_reach(changes, name_layers())
    assert measure(model, sizes) == set(range(1, 80))


@SIZES
def test_c02_a_ratio_is_an_exact_window(sizes: list[int]) -> None:
    model = make_reach({}, name_layers(ratio=20 / REACH_LEN))
    assert model.cache_specs()[0].lifetime == Window(tokens=20)
    assert measure(model, sizes) == set(range(1, 20))


@SIZES
def test_c02_first_tokens_stay_beside_the_window(sizes: list[int]) -> None:
    model = make_reach({}, name_layers(ratio=20 / REACH_LEN, sinks=4))
    last = len(make_reach_prompt()) - 1
    assert measure(model, sizes) == set(range(1, 20)) | set(range(last - 3, last + 1))


@SIZES
def test_c03_the_window_of_a_checkpoint_is_not_widened_by_a_ratio(sizes: list[int]) -> None:
    changes = {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 0}
    model = make_reach(changes, name_layers(ratio=0.5))
    assert measure(model, sizes) == set(range(1, 20))


def test_c03_gemma2_keeps_its_first_layer_short_and_its_second_whole() -> None:
    for num_layers, reach in ((1, 20), (2, 80)):
        changes = {
            "sliding_window": 20,
            "num_hidden_layers": num_layers,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }
        model = make_reach(changes, HybridConfig(enabled=True), model_type="gemma2")
        assert measure(model, CHUNKS) == set(range(1, reach))
