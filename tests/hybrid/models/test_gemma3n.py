"""Gemma 3n against transformers; layers that read the caches of others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.hybrid.models.checks import (
    check_against_transformers,
    check_ways_of_computing,
    make_driver,
)
from tests.hybrid.models.forgetting import check_hybrid_equals_vanilla
from tests.hybrid.models.tiny import BASE, TinyCheckpoint, TinyRow, make_checkpoint
from tests.models.compare import make_prompts

NUM_SHARED = 3
ROW = TinyRow(
    model_type="gemma3n_text",
    config={
        **BASE,
        "num_hidden_layers": 7,
        "intermediate_size": [48, 48, 64, 48, 64, 48, 48],
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
        "sliding_window": 20,
        "num_kv_shared_layers": NUM_SHARED,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 300,
        "altup_num_inputs": 3,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.8, 0.8, 0.0, 0.0, 0.5, 0.0, 0.0],
    },
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """The tiny checkpoint."""
    return make_checkpoint(ROW, tmp_path_factory.mktemp("gemma3n"))


def test_equals_transformers(checkpoint: TinyCheckpoint) -> None:
    check_against_transformers(checkpoint, ROW.prompt_lens)


def test_caches_that_forget_give_the_same_bits(checkpoint: TinyCheckpoint) -> None:
    check_hybrid_equals_vanilla(checkpoint, (1, 19, 20, 21, 70))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_same_bits_in_chunks_and_batches(
    checkpoint: TinyCheckpoint, dtype: torch.dtype
) -> None:
    check_ways_of_computing(checkpoint, 50, dtype=dtype)


def test_shared_layers_read_the_last_layer_of_their_type(checkpoint: TinyCheckpoint) -> None:
    driver = make_driver(checkpoint)
    specs = driver.model.cache_specs()
    assert [spec.reads_from for spec in specs] == [None, None, None, None, 2, 3, 2]
    for spec in specs[-NUM_SHARED:]:
        assert spec.fields == () and spec.token_bytes == 0
        assert spec.reads_from is not None
        own, owner = driver.caches[spec.layer], driver.caches[spec.reads_from]
        for view, other in zip(own.tensors, owner.tensors, strict=True):
            assert view.data_ptr() == other.data_ptr()
    assert sum(spec.token_bytes for spec in specs) == 4 * specs[0].token_bytes


def test_a_checkpoint_may_hold_the_projections_that_are_not_used(
    checkpoint: TinyCheckpoint,
) -> None:
    """Published files have keys and values of every layer."""
    prefix = "model.layers.5.self_attn"
    extra = {
        f"{prefix}.{name}": torch.full_like(
            checkpoint.weights[f"model.layers.3.self_attn.{name}"], 9
        )
        for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    }
    more = replace(checkpoint, weights={**checkpoint.weights, **extra})
    (prompt,) = make_prompts((30,))
    (found,) = make_driver(more).step({0: prompt})
    (expected,) = make_driver(checkpoint).step({0: prompt})
    assert torch.equal(found, expected)


def test_the_whole_model_gives_its_text_part(checkpoint: TinyCheckpoint) -> None:
    renamed = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in checkpoint.weights.items()
    }
    renamed["model.vision_tower.conv.weight"] = torch.zeros(2)
    renamed["model.audio_tower.conv.weight"] = torch.zeros(2)
    whole = replace(checkpoint, weights=renamed)
    (prompt,) = make_prompts((30,))
    (found,) = make_driver(whole).step({0: prompt})
    (expected,) = make_driver(checkpoint).step({0: prompt})
    assert torch.equal(found, expected)
