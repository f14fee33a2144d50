"""Spellings of rotary settings (case C30) and the lengths that follow from them."""

from __future__ import annotations

from typing import Any

import pytest

from vllm.errors import ConfigError
from vllm.transformers_utils.rope_config import (
    context_len,
    normalize_rope,
    normalize_rope_by_layer_type,
)

_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}


def normalize(scaling: dict[str, Any] | None, **config: Any) -> dict[str, Any]:
    result = {"rope_theta": 1e4, "max_position_embeddings": 256, "rope_scaling": scaling, **config}
    normalize_rope(result)
    return result


@pytest.mark.parametrize(
    ("scaling", "expected", "length"),
    [
        ({"type": "linear", "factor": 2.0}, _LINEAR, 512),
        ({"rope_type": "linear", "factor": 2.0}, _LINEAR, 512),
        ({"type": "linear", "rope_type": "linear", "factor": 2.0}, _LINEAR, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            None,
            256,
        ),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, None, 256),
        ({"type": "yarn", "factor": 4.0}, None, 1024),
        ({"type": "dynamic", "factor": 3.0}, None, 768),
        ({"type": "su", "short_factor": [1.0], "long_factor": [2.0]}, None, 256),
        ({"rope_type": "default"}, _DEFAULT, 256),
        ({"type": "default"}, _DEFAULT, 256),
        ({}, _DEFAULT, 256),
        (None, _DEFAULT, 256),
    ],
)
def test_c30_spellings_and_lengths(
    scaling: dict[str, Any] | None, expected: dict[str, Any] | None, length: int
) -> None:
    config = normalize(scaling)
    assert context_len(config) == length
    if expected is not None:
        assert config["rope_parameters"] == expected
    assert "rope_scaling" not in config and "rope_theta" not in config


def test_c30_a_missing_kind_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rope_scaling.*'rope_type'.*'type'"):
        normalize({"factor": 2.0})


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3", "longrope"])
def test_a_missing_number_is_named(kind: str) -> None:
    with pytest.raises(ConfigError, match="factor"):
        normalize({"rope_type": kind})


def test_kinds_that_contradict_each_other(caplog: pytest.LogCaptureFixture) -> None:
    config = normalize({"rope_type": "linear", "type": "dynamic", "factor": 5.0})
    assert config["rope_parameters"]["rope_type"] == "linear"
    assert "rope_type is used" in caplog.text


def test_new_spelling_wins_over_the_plain_base() -> None:
    config = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 9e4}}
    normalize_rope(config)
    assert config["rope_parameters"]["rope_theta"] == 9e4


def test_base_defaults_to_that_of_the_family() -> None:
    config: dict[str, Any] = {"rope_theta": None}
    normalize_rope(config, default_theta=1e6)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}


def test_settings_nested_by_layer_type_stay_nested() -> None:
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    }
    config: dict[str, Any] = {"rope_parameters": nested, "max_position_embeddings": 128}
    normalize_rope(config)
    assert config["rope_parameters"]["sliding_attention"] == _DEFAULT
    assert config["rope_parameters"]["full_attention"]["rope_type"] == "linear"
    assert context_len(config) == 128


def test_error_in_nested_settings_names_the_layer_type() -> None:
    config: dict[str, Any] = {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}
    with pytest.raises(ConfigError, match=r"rope_parameters\.full_attention"):
        normalize_rope_by_layer_type(config, full_theta=1e6, sliding_theta=1e4)


def test_trained_length_beside_the_settings_is_taken() -> None:
    config = normalize(
        {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        original_max_position_embeddings=32,
    )
    assert config["rope_parameters"]["original_max_position_embeddings"] == 32


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, None),
        ({"n_positions": 77}, 77),
        ({"max_position_embeddings": 100, "seq_length": 50}, 50),
        ({"max_position_embeddings": 100, "model_max_length": None}, 100),
    ],
)
def test_the_smallest_length_key_counts(config: dict[str, Any], length: int | None) -> None:
    assert context_len(config) == length
