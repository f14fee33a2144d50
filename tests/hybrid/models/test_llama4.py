"""Llama 4 against transformers; edges of chunks; queries that grow with their position."""

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
from tests.models.compare import make_prompts, reference_logits
from vllm.errors import ConfigError
from vllm.model_executor.models.llama4 import Llama4ForCausalLM

CHUNK = 24
ROW = TinyRow(
    model_type="llama4_text",
    config={
        **BASE,
        "intermediate_size_mlp": 80,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0, 1, 0],
        "attention_chunk_size": CHUNK,
        "floor_scale": 16,
        "attn_scale": 0.3,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
)
TWO_EXPERTS = replace(
    ROW,
    config={
        **ROW.config,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """The tiny checkpoint."""
    made = make_checkpoint(ROW, tmp_path_factory.mktemp("llama4"))
    assert made.config["layer_types"] == ["chunked_attention", "full_attention"] * 2
    return made


def test_equals_transformers(checkpoint: TinyCheckpoint) -> None:
    check_against_transformers(checkpoint, ROW.prompt_lens)


def test_two_experts_a_token_without_norms(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = make_checkpoint(TWO_EXPERTS, tmp_path_factory.mktemp("llama4_two"))
    check_against_transformers(made, (3, 60), num_tokens=16)


def test_caches_that_forget_give_the_same_bits(checkpoint: TinyCheckpoint) -> None:
    check_hybrid_equals_vanilla(checkpoint, (1, 23, 24, 25, 70))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_same_bits_in_chunks_and_batches(
    checkpoint: TinyCheckpoint, dtype: torch.dtype
) -> None:
    check_ways_of_computing(checkpoint, 50, dtype=dtype)


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1])
def test_edges_of_chunks(checkpoint: TinyCheckpoint, length: int) -> None:
    (prompt,) = make_prompts((length,))
    expected = reference_logits(checkpoint.reference, prompt)
    driver = make_driver(checkpoint, kernel="torch")
    (whole,) = driver.step({0: prompt}, all_logits=True)
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-4)
    steps = [driver.step({1: [token]}, all_logits=True)[0] for token in prompt]
    torch.testing.assert_close(torch.cat(steps), expected, rtol=0, atol=1e-4)


def test_layers_ask_for_their_chunk(checkpoint: TinyCheckpoint) -> None:
    layers = make_driver(checkpoint).model.attention_layers()
    assert [layers[i].query.chunk_tokens for i in range(4)] == [CHUNK, 0, CHUNK, 0]


def test_an_unknown_layer_type_is_refused(checkpoint: TinyCheckpoint) -> None:
    config = {**checkpoint.config, "layer_types": ["sliding_attention"] * 4}
    with pytest.raises(ConfigError, match="layer 0 has layer type 'sliding_attention'"):
        Llama4ForCausalLM.read_shape(config)
