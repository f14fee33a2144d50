"""DeepSeek-V2 against transformers; its compressed cache; its choice of experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.hybrid.models.checks import (
    check_against_transformers,
    check_ways_of_computing,
    make_driver,
)
from tests.hybrid.models.forgetting import ForgettingDriver, limit_model
from tests.hybrid.models.tiny import BASE, TinyCheckpoint, TinyRow, make_checkpoint
from tests.models.compare import make_prompts, reference_logits
from tests.models.families import load_ours
from tests.utils.paged_driver import PagedDriver
from vllm.cache_spec import Full, Window
from vllm.config.hybrid import HybridConfig
from vllm.distributed.parallel_state import TensorParallel
from vllm.errors import ConfigError
from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM

ROW = TinyRow(
    model_type="deepseek_v2",
    config={
        **{k: v for k, v in BASE.items() if k not in ("head_dim", "num_key_value_heads")},
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 48,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
    },
)
LITE = replace(
    ROW,
    config={
        **ROW.config,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """The tiny checkpoint."""
    return make_checkpoint(ROW, tmp_path_factory.mktemp("deepseek_v2"))


def test_equals_transformers(checkpoint: TinyCheckpoint) -> None:
    check_against_transformers(checkpoint, ROW.prompt_lens)


def test_lite_equals_transformers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No rank for queries, biases, greedy choice of experts."""
    made = make_checkpoint(LITE, tmp_path_factory.mktemp("deepseek_v2_lite"))
    check_against_transformers(made, (3, 60), num_tokens=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_same_bits_in_chunks_and_batches(
    checkpoint: TinyCheckpoint, dtype: torch.dtype
) -> None:
    check_ways_of_computing(checkpoint, 50, dtype=dtype)


def test_the_oracle_kernel_serves_it_too(checkpoint: TinyCheckpoint) -> None:
    (prompt,) = make_prompts((45,))
    expected = reference_logits(checkpoint.reference, prompt)
    driver = make_driver(checkpoint, kernel="torch")
    driver.step({0: prompt[:20]})
    (found,) = driver.step({0: prompt[20:]}, all_logits=True)
    torch.testing.assert_close(found, expected[20:], rtol=0, atol=1e-4)


def test_a_token_keeps_one_compressed_row(checkpoint: TinyCheckpoint) -> None:
    model = make_driver(checkpoint).model
    for spec in model.cache_specs():
        (field,) = spec.fields
        assert field.name == "latent" and field.per == "token"
        assert spec.token_bytes == (48 + 16) * 4
    for layer in model.attention_layers().values():
        assert layer.query.has_one_field and layer.query.head_size == 64


def test_a_window_over_compressed_rows(checkpoint: TinyCheckpoint) -> None:
    """Layers that the user shortens see their window, and no row outside it."""
    hybrid = HybridConfig(
        enabled=True,
        layers={"near": (0, 2), "far": (1,)},
        kv_cache_ratio={"near": 20 / 512},
        kv_sink_tokens={"near": 3},
    )
    model = load_ours(checkpoint.config, checkpoint.weights)
    limit_model(model, checkpoint.config, hybrid)
    window = Window(tokens=20, sinks=3)
    assert [spec.lifetime for spec in model.cache_specs()] == [window, Full(), window]
    prompts = make_prompts((19, 21, 70))
    masked = PagedDriver(model, kernel="cpu").generate(prompts, 20)
    forgotten = ForgettingDriver(model, kernel="cpu", poison_freed=True)
    for one, other in zip(masked, forgotten.generate(prompts, 20, chunk_tokens=13), strict=True):
        assert one.token_ids == other.token_ids
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
    (whole,) = make_driver(checkpoint).step({0: prompts[2]})
    assert (whole - masked[2].logits[0]).abs().max() > 1e-3


def test_unpacked_weights_give_the_same(checkpoint: TinyCheckpoint) -> None:
    """What runs on devices without packed weights."""
    block = make_driver(checkpoint).model.get_submodule("layers.0.attention.expansion")
    plain = DeepseekV2ForCausalLM(
        checkpoint.config, dtype=torch.float32, tp=TensorParallel.single()
    ).get_submodule("layers.0.attention.expansion")
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    plain.place("weight", None).write(checkpoint.weights[name])
    query = torch.randn(5, 4, 24)
    outs = torch.empty(2, 5, 4, 48)
    for module, out in zip((block, plain), outs, strict=True):
        module.absorb_query(query, out)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-6)
    values = torch.empty(2, 5, 4, plain._sizes.value)
    for module, value in zip((block, plain), values, strict=True):
        module.expand_value(outs[0], value)
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not served"),
        ({"norm_topk_prob": True}, "norm_topk_prob is true"),
    ],
)
def test_what_is_not_served_is_refused(
    checkpoint: TinyCheckpoint, change: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        DeepseekV2ForCausalLM.read_shape({**checkpoint.config, **change})
