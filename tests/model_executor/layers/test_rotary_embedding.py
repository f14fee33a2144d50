"""Rotary tables against transformers for every rope type, and the numbers of case C30."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vllm.errors import ConfigError
from vllm.model_executor.layers.rotary_embedding import (
    RopeSpec,
    compute_frequencies,
    compute_table,
    get_rope,
)
from vllm.transformers_utils.rope_config import normalize_rope

HEAD_SIZE = 32
MAX_POSITIONS = 256
SHORT = [1.0 + 0.05 * i for i in range(HEAD_SIZE // 2)]
LONG = [1.0 + 0.5 * i for i in range(HEAD_SIZE // 2)]

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_all_keys": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
    },
    "yarn_untruncated": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
        "attention_factor": 1.3,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 64,
    },
    "longrope_factor": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def make_spec(
    settings: dict[str, Any], max_model_len: int = MAX_POSITIONS, **config: Any
) -> RopeSpec:
    made = {"max_position_embeddings": MAX_POSITIONS, "rope_scaling": settings, **config}
    normalize_rope(made)
    return RopeSpec(
        head_size=HEAD_SIZE,
        settings=made["rope_parameters"],
        max_positions=MAX_POSITIONS,
        max_model_len=max_model_len,
    )


def reference_table(
    settings: dict[str, Any], num_positions: int, theta: float = 10_000.0
) -> Tensor:
    """What transformers' Llama turns a whole sequence of that length by: [positions, cos | sin]."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=2 * HEAD_SIZE,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={**settings, "rope_theta": theta},
    )
    rope = LlamaRotaryEmbedding(config)
    cos, sin = rope(torch.zeros(1, dtype=torch.float32), torch.arange(num_positions)[None])
    half = HEAD_SIZE // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_equals_transformers_over_the_whole_length(name: str, theta: float) -> None:
    spec = make_spec(SETTINGS[name], rope_theta=theta)
    expected = reference_table(SETTINGS[name], MAX_POSITIONS, theta)
    torch.testing.assert_close(compute_table(spec, 0, MAX_POSITIONS), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["longrope", "longrope_factor"])
def test_longrope_takes_the_short_factors_where_the_engine_stays_short(name: str) -> None:
    spec = make_spec(SETTINGS[name], max_model_len=64)
    expected = reference_table(SETTINGS[name], 64)
    torch.testing.assert_close(compute_table(spec, 0, 64), expected, rtol=0, atol=1e-6)
    is_long = reference_table(SETTINGS[name], 65)[:64]
    assert not torch.allclose(is_long, expected, atol=1e-2)


def test_dynamic_turns_each_new_token_as_transformers_does_with_a_cache() -> None:
    settings = SETTINGS["dynamic"]
    table = compute_table(make_spec(settings), 0, 2 * MAX_POSITIONS)
    for length in (MAX_POSITIONS, MAX_POSITIONS + 1, MAX_POSITIONS + 2, 300, 2 * MAX_POSITIONS):
        expected = reference_table(settings, length)[-1]
        torch.testing.assert_close(table[length - 1], expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_partial_turns_the_first_part_of_a_head(fraction: float) -> None:
    from transformers import StableLmConfig
    from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding

    config = StableLmConfig(
        hidden_size=2 * HEAD_SIZE,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": fraction,
        },
    )
    cos, sin = StableLmRotaryEmbedding(config)(
        torch.zeros(1, dtype=torch.float32), torch.arange(MAX_POSITIONS)[None]
    )
    spec = make_spec({"rope_type": "default"}, partial_rotary_factor=fraction)
    assert spec.rotary_dim == HEAD_SIZE * fraction
    half = spec.rotary_dim // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    torch.testing.assert_close(compute_table(spec, 0, MAX_POSITIONS), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("fraction", [0.25, 1.0])
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_proportional_leaves_the_slow_part_of_a_head_still(fraction: float, factor: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {
        "rope_type": "proportional",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": fraction,
        "factor": factor,
    }
    config = LlamaConfig(
        hidden_size=2 * HEAD_SIZE, num_attention_heads=2, rope_parameters=dict(settings)
    )
    expected, _ = ROPE_INIT_FUNCTIONS["proportional"](config)
    spec = make_spec(settings)
    assert spec.rotary_dim == HEAD_SIZE
    torch.testing.assert_close(compute_frequencies(spec), expected, rtol=0, atol=1e-7)


def test_far_positions_keep_transformers_bits() -> None:
    """At 100,000 an error of one float32 step in a frequency is worth 1e-2 of a turn."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = SETTINGS["llama3"] | {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=1,
        max_position_embeddings=131072,
        rope_parameters=dict(settings),
    )
    positions = torch.tensor([[131070, 131071]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions)
    spec = RopeSpec(head_size=128, settings=settings, max_positions=131072, max_model_len=131072)
    expected = torch.cat((cos[0, :, :64], sin[0, :, :64]), dim=-1)
    torch.testing.assert_close(compute_table(spec, 131070, 131072), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["default", "dynamic", "yarn"])
def test_growing_keeps_the_bits_of_the_rows_that_exist(name: str) -> None:
    rope = get_rope(
        HEAD_SIZE,
        make_spec(SETTINGS[name]).settings,
        max_positions=MAX_POSITIONS,
        max_model_len=MAX_POSITIONS,
    )
    before = rope.cos_sin.clone()
    rope.reserve(len(before))
    assert rope.cos_sin.shape == before.shape
    rope.reserve(len(before) + 1)
    assert len(rope.cos_sin) > len(before)
    assert torch.equal(rope.cos_sin[: len(before)], before)
    assert torch.equal(rope.cos_sin, compute_table(rope.spec, 0, len(rope.cos_sin)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_table_is_whole_from_the_start_on_a_gpu() -> None:
    settings = {"rope_type": "default", "rope_theta": 10000.0}
    with torch.device("cuda"):
        rope = get_rope(16, settings, max_positions=3000, max_model_len=3000)
    address = rope.cos_sin.data_ptr()
    rope.reserve(3000)
    assert rope.cos_sin.data_ptr() == address
    assert torch.equal(rope.cos_sin.cpu(), compute_table(rope.spec, 0, 3000))


# Case C30: head size 8, theta 10000, max_position_embeddings 256.
C30 = {
    "old": ({"type": "linear", "factor": 2.0}, [0.5, 0.05, 0.005, 0.0005]),
    "new": ({"rope_type": "linear", "factor": 2.0}, [0.5, 0.05, 0.005, 0.0005]),
    "both": ({"type": "linear", "rope_type": "linear", "factor": 2.0}, [0.5, 0.05, 0.005, 0.0005]),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        [1.0, 0.013042, 0.00125, 0.000125],
    ),
    "yarn": (
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        [1.0, 0.0625, 0.0025, 0.00025],
    ),
    "default": ({"rope_type": "default"}, [1.0, 0.1, 0.01, 0.001]),
    "null": (None, [1.0, 0.1, 0.01, 0.001]),
}


@pytest.mark.parametrize("name", C30)
def test_c30_frequencies(name: str) -> None:
    settings, expected = C30[name]
    config = {"max_position_embeddings": 256, "rope_theta": 10_000.0, "rope_scaling": settings}
    normalize_rope(config)
    rope = get_rope(8, config["rope_parameters"], max_positions=256, max_model_len=256)
    torch.testing.assert_close(
        compute_frequencies(rope.spec), torch.tensor(expected), rtol=0, atol=1e-5
    )
    attention_factor = rope.cos_sin[0, 0].item()
    assert attention_factor == pytest.approx(1.1386 if name == "yarn" else 1.0, abs=1e-4)


def test_c30_missing_kind_names_the_key() -> None:
    with pytest.raises(ConfigError, match="rope_type"):
        normalize_rope({"max_position_embeddings": 256, "rope_scaling": {"factor": 2.0}})


def test_factors_of_the_wrong_length_are_refused() -> None:
    settings = SETTINGS["longrope"] | {"long_factor": [1.0, 2.0], "rope_theta": 1e4}
    with pytest.raises(ConfigError, match=r"long_factor .* 2 numbers; .* needs 16"):
        get_rope(HEAD_SIZE, settings, max_positions=256, max_model_len=256)


def test_unknown_type_and_odd_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="'spiral' is not known"):
        get_rope(
            HEAD_SIZE, {"rope_type": "spiral", "rope_theta": 1e4}, max_positions=8, max_model_len=8
        )
    settings = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.1}
    with pytest.raises(ConfigError, match="even"):
        get_rope(HEAD_SIZE, settings, max_positions=8, max_model_len=8)
