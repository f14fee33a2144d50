"""Configs of GGUF files: every family, rotary scaling, and what the files leave out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.families import FAMILIES, make_reference
from tests.utils.fixtures_gguf import write_fx_gguf, write_gguf
from vllm.errors import ConfigError
from vllm.transformers_utils.config import get_config, get_generation_config

# What a model is built from; keys that a file cannot tell and no model reads are left out.
_BUILDS = [
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "layer_types",
    "hidden_act",
    "hidden_activation",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
]
_SERVED = (
    "llama",
    "mistral_window",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_scaled",
    "mixtral",
    "qwen2_moe_window",
)


def write_family(name: str, directory: Path, **config: Any) -> tuple[Path, Path]:
    """Write a tiny model as a directory and as a GGUF file."""
    from safetensors.torch import load_file

    reference = make_reference(name)
    reference.save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    file = write_gguf(directory / f"{name}.gguf", {**reference.config.to_dict(), **config}, weights)
    return directory, file


@pytest.mark.parametrize("name", _SERVED)
def test_a_file_gives_the_config_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    directory, file = write_family(name, tmp_path)
    ours, expected = get_config(str(file)), get_config(str(directory))
    # Only config.json tells Gemma's scale (readers know it by size) and pattern of windows.
    if "query_pre_attn_scalar" in expected:
        expected["query_pre_attn_scalar"] = expected["head_dim"]
    if name.startswith("gemma3"):
        expected["layer_types"] = ["sliding_attention"] * expected["num_hidden_layers"]
    if name == "qwen2_moe_window":  # files of this family know no windows, and do not renormalise
        expected |= {"sliding_window": None, "norm_topk_prob": False}
        expected["layer_types"] = ["full_attention"] * expected["num_hidden_layers"]
    for key in _BUILDS:
        assert ours.get(key) == expected.get(key), key
    assert ours["rms_norm_eps"] == pytest.approx(expected["rms_norm_eps"], rel=1e-6)


def test_real_smollm2(smollm2_gguf: Path) -> None:
    config = get_config(str(smollm2_gguf))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["intermediate_size"]) == (576, 1536)
    assert (config["num_hidden_layers"], config["head_dim"]) == (30, 64)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert (config["vocab_size"], config["max_position_embeddings"]) == (49152, 8192)
    assert config["tie_word_embeddings"] and config["eos_token_id"] == 2
    assert get_generation_config(str(smollm2_gguf)) == {"eos_token_id": [2]}


def test_real_gemma3(gemma3_gguf: Path) -> None:
    """The file names neither the window pattern nor the local rotary base."""
    config = get_config(str(gemma3_gguf))
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert (config["hidden_size"], config["num_hidden_layers"]) == (640, 18)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 1)
    assert (config["head_dim"], config["query_pre_attn_scalar"]) == (256, 256)
    assert (config["sliding_window"], config["vocab_size"]) == (512, 262144)
    full = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    assert full == [5, 11, 17]
    assert config["rope_parameters"]["full_attention"]["rope_theta"] == 1e6
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 1e4
    assert config["tie_word_embeddings"] and config["final_logit_softcapping"] is None


def test_stop_ids_of_turns_are_listed(tmp_path: Path) -> None:
    path = write_fx_gguf(
        tmp_path / "fx.gguf",
        metadata={"tokenizer.ggml.eot_token_id": 300, "tokenizer.ggml.eom_token_id": 257},
    )
    assert get_generation_config(str(path)) == {"eos_token_id": [257, 300]}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"llama.rope.scale_linear": 1.0}, {"rope_type": "default"}),
        ({"llama.rope.scaling.type": "none"}, {"rope_type": "default"}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 100,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 100,
                "beta_fast": 16.0,
            },
        ),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        (
            {"llama.rope.dimension_count": 32},
            {"rope_type": "default", "partial_rotary_factor": 0.5},
        ),
    ],
)
def test_rotary_scaling_of_the_metadata(
    metadata: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    path = write_fx_gguf(tmp_path / "fx.gguf", metadata=metadata)
    assert get_config(str(path))["rope_parameters"] == {"rope_theta": 1e4, **expected}


class TestRotaryFactors:
    """Case C34: the rotary factors that converters store as a tensor."""

    def test_ones_change_nothing(self, tmp_path: Path) -> None:
        ones = {"rope_freqs.weight": np.ones(32, np.float32)}
        plain = get_config(str(write_fx_gguf(tmp_path / "a.gguf")))
        assert get_config(str(write_fx_gguf(tmp_path / "b.gguf", extra=ones))) == plain

    def test_real_factors_become_settings(self, tmp_path: Path) -> None:
        factors = np.linspace(1, 8, 32, dtype=np.float32)
        path = write_fx_gguf(tmp_path / "fx.gguf", extra={"rope_freqs.weight": factors})
        rope = get_config(str(path))["rope_parameters"]
        assert rope["long_factor"] == rope["short_factor"] == factors.tolist()
        assert rope["rope_type"] == "longrope" and rope["attention_factor"] == 1.0

    def test_factors_beside_another_scaling_are_refused(self, tmp_path: Path) -> None:
        path = write_fx_gguf(
            tmp_path / "fx.gguf",
            extra={"rope_freqs.weight": np.full(32, 2, np.float32)},
            metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
        )
        with pytest.raises(ConfigError, match=r"twice.*linear.*rope_freqs\.weight"):
            get_config(str(path))

    def test_a_wrong_number_of_factors_is_refused(self, tmp_path: Path) -> None:
        extra = {"rope_freqs.weight": np.full(16, 2, np.float32)}
        with pytest.raises(ConfigError, match="16 factors, but 32"):
            get_config(str(write_fx_gguf(tmp_path / "fx.gguf", extra=extra)))

    def test_factors_of_another_type_are_refused(self, tmp_path: Path) -> None:
        extra = {"rope_freqs.weight": np.ones(32, np.float16)}
        with pytest.raises(ConfigError, match="F16; expected F32"):
            get_config(str(write_fx_gguf(tmp_path / "fx.gguf", extra=extra)))


def test_an_architecture_that_is_not_served_is_named(tmp_path: Path) -> None:
    path = write_fx_gguf(tmp_path / "fx.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(ConfigError, match=r"'mamba'.*gemma3, llama.*qwen2"):
        get_config(str(path))


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = write_fx_gguf(tmp_path / "fx.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.block_xount"))
    with pytest.raises(ConfigError, match=r"'llama\.block_count' is missing"):
        get_config(str(path))


def test_head_size_of_files_that_do_not_state_it(tmp_path: Path) -> None:
    path = write_fx_gguf(tmp_path / "fx.gguf", head_dim=32)
    path.write_bytes(path.read_bytes().replace(b"attention.key_length", b"attention.key_lxngth"))
    assert get_config(str(path))["head_dim"] == 32


def test_layers_that_differ_are_refused(tmp_path: Path) -> None:
    metadata = {"llama.attention.head_count_kv": [1, 2]}
    with pytest.raises(ConfigError, match=r"head_count_kv.*\[1, 2\]"):
        get_config(str(write_fx_gguf(tmp_path / "fx.gguf", metadata=metadata)))


def test_sizes_repeated_for_every_layer_are_read(tmp_path: Path) -> None:
    metadata = {"llama.attention.head_count_kv": [1, 1], "llama.feed_forward_length": [256, 256]}
    config = get_config(str(write_fx_gguf(tmp_path / "fx.gguf", metadata=metadata)))
    assert (config["num_key_value_heads"], config["intermediate_size"]) == (1, 256)


@pytest.mark.parametrize(("arch", "layers", "scale"), [("gemma2", 46, 16), ("gemma2", 26, 32)])
def test_attention_scale_of_gemma_sizes(arch: str, layers: int, scale: int, tmp_path: Path) -> None:
    """The 27B model divides by hidden size / heads, the others by the head size."""
    reference = make_reference("gemma2")
    config = {**reference.config.to_dict(), "num_hidden_layers": layers}
    path = write_gguf(tmp_path / "g.gguf", config, {})
    assert get_config(str(path))["query_pre_attn_scalar"] == scale


def test_every_family_of_the_model_tests_is_known_here() -> None:
    kinds = {FAMILIES[name].model_type for name in _SERVED}
    assert kinds == {row.model_type for row in FAMILIES.values()}
