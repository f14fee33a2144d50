"""gpt-oss against transformers; its sink logits; checkpoints that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

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
from vllm.transformers_utils.config import get_config

ROW = TinyRow(
    model_type="gpt_oss",
    config={
        **BASE,
        "sliding_window": 20,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """The tiny checkpoint."""
    made = make_checkpoint(ROW, tmp_path_factory.mktemp("gpt_oss"))
    assert made.config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    return made


def test_equals_transformers(checkpoint: TinyCheckpoint) -> None:
    check_against_transformers(checkpoint, ROW.prompt_lens)


def test_caches_that_forget_give_the_same_bits(checkpoint: TinyCheckpoint) -> None:
    check_hybrid_equals_vanilla(checkpoint, (1, 19, 20, 21, 70))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_same_bits_in_chunks_and_batches(
    checkpoint: TinyCheckpoint, dtype: torch.dtype
) -> None:
    check_ways_of_computing(checkpoint, 50, dtype=dtype)


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
@pytest.mark.parametrize("layer", [0, 1], ids=["window", "full"])
def test_a_large_sink_changes_prefill_and_decode_alike(
    checkpoint: TinyCheckpoint, kernel: str, layer: int
) -> None:
    name = f"model.layers.{layer}.self_attn.sinks"
    weights = {**checkpoint.weights, name: torch.full((4,), 4.0)}
    changed = replace(checkpoint, weights=weights)
    (prompt,) = make_prompts((48,))
    (before,) = make_driver(checkpoint, kernel=kernel).step({0: prompt}, all_logits=True)
    driver = make_driver(changed, kernel=kernel)
    (after,) = driver.step({0: prompt}, all_logits=True)
    assert ((after - before).abs().amax(dim=1) > 0.05).all()
    decoded = torch.cat([driver.step({1: [token]}, all_logits=True)[0] for token in prompt])
    torch.testing.assert_close(decoded, after, rtol=0, atol=1e-5)
    attention = checkpoint.reference.model.layers[layer].self_attn
    kept = attention.sinks.data.clone()
    attention.sinks.data.fill_(4.0)
    expected = reference_logits(checkpoint.reference, prompt)
    attention.sinks.data.copy_(kept)
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-4)


def test_the_gate_is_clamped(checkpoint: TinyCheckpoint) -> None:
    """Biases of 30 reach the limit of 7, on both sides."""
    weights = dict(checkpoint.weights)
    reference_state = checkpoint.reference.state_dict()
    name = "model.layers.1.mlp.experts.gate_up_proj_bias"
    bias = torch.tensor([30.0, -30.0, -30.0, 30.0]).repeat(24).expand(6, 96)
    weights[name] = bias.contiguous()
    kept = reference_state[name].clone()
    reference_state[name].copy_(bias)
    (prompt,) = make_prompts((20,))
    expected = reference_logits(checkpoint.reference, prompt)
    reference_state[name].copy_(kept)
    changed = make_driver(replace(checkpoint, weights=weights))
    (found,) = changed.step({0: prompt}, all_logits=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_mxfp4_is_refused_by_name(checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    config = json.loads((checkpoint.directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantised with mxfp4"):
        get_config(str(tmp_path))
