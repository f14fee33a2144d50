"""Configs of directories: defaults as transformers has them, nesting, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm.errors import ConfigError
from vllm.transformers_utils.config import get_config, get_generation_config
from vllm.transformers_utils.config_families import FAMILIES

# Keys of transformers' configs that mean nothing to a server of text.
_FOREIGN = {
    "attention_dropout",
    "chunk_size_feed_forward",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sliding_window_pattern",
    "transformers_version",
    "use_bidirectional_attention",
    "use_cache",
    "_name_or_path",
    "_sliding_window_pattern",
}
_SMALL = {"num_hidden_layers": 7, "hidden_size": 96, "num_attention_heads": 6}
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{kind}_empty": (kind, {}) for kind in FAMILIES},
    **{
        f"{kind}_small": (kind, {**_SMALL, "num_key_value_heads": 2, "rope_theta": 5e5})
        for kind in FAMILIES
    },
    "llama_null_heads": ("llama", {**_SMALL, "num_key_value_heads": None, "head_dim": None}),
    "llama_head_dim": ("llama", {**_SMALL, "head_dim": 40}),
    "llama_new_rope": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}),
    "llama_partial": ("llama", {**_SMALL, "partial_rotary_factor": 0.5}),
    "llama_linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama_dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama_yarn": (
        "llama",
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
    ),
    "llama_yarn_no_length": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "llama_llama3": (
        "llama",
        {
            "rope_theta": 5e5,
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "llama_longrope": (
        "llama",
        {
            **_SMALL,
            "rope_scaling": {
                "type": "longrope",
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
        },
    ),
    "mistral_no_window": ("mistral", {**_SMALL, "sliding_window": None}),
    "qwen2_window": (
        "qwen2",
        {**_SMALL, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
    ),
    "qwen2_window_off": (
        "qwen2",
        {**_SMALL, "use_sliding_window": False, "sliding_window": 9, "max_window_layers": 3},
    ),
    "qwen3_window": (
        "qwen3",
        {**_SMALL, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ),
    "qwen2_moe_window": (
        "qwen2_moe",
        {**_SMALL, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 4},
    ),
    "gemma2_types": ("gemma2", {**_SMALL, "layer_types": ["full_attention"] * 7}),
    "gemma3_pattern": ("gemma3_text", {**_SMALL, "sliding_window_pattern": 3}),
    "gemma3_old_rope": (
        "gemma3_text",
        {
            **_SMALL,
            "rope_theta": 2e6,
            "rope_local_base_freq": 20_000.0,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    ),
    "gemma3_new_rope": (
        "gemma3_text",
        {
            **_SMALL,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


def write_config(directory: Path, config: dict[str, Any], name: str = "config.json") -> str:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps(config))
    return str(directory)


def _as_we_say_it(key: str, value: Any, theirs: dict[str, Any]) -> Any:
    if key == "sliding_window" and value == 0:
        return None  # transformers' Qwen2-MoE writes "no window" as 0
    if key == "rope_parameters":
        return {k: v for k, v in value.items() if k != "type"}  # the old name, kept beside
    if key == "head_dim" and value is None:  # left for its model code to work out
        return theirs["hidden_size"] // theirs["num_attention_heads"]
    return value


@pytest.mark.parametrize("case", _CASES)
def test_a_family_is_completed_as_transformers_completes_it(case: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    kind, given = _CASES[case]
    raw = {"model_type": kind, "architectures": ["X"], "torch_dtype": "bfloat16", **given}
    path = write_config(tmp_path, raw)
    ours = get_config(path)
    theirs = AutoConfig.from_pretrained(path).to_dict()
    for key, value in theirs.items():
        if key not in _FOREIGN:
            expected = _as_we_say_it(key, value, theirs)
            assert ours[key] == expected, f"{key}: {ours[key]} != {expected}"
    assert ours["head_dim"] and ours["dtype"] == "bfloat16"
    assert not {"rope_theta", "rope_scaling", "torch_dtype", "rope_local_base_freq"} & set(ours)


@pytest.mark.parametrize("kind", FAMILIES)
def test_completing_twice_changes_nothing(kind: str, tmp_path: Path) -> None:
    once = get_config(write_config(tmp_path, {"model_type": kind, **_SMALL}))
    assert get_config(write_config(tmp_path / "again", once)) == once


def test_missing_architectures_come_from_the_family(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"model_type": "qwen3"})
    assert get_config(path)["architectures"] == ["Qwen3ForCausalLM"]


def test_missing_model_type_comes_from_the_architecture(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"architectures": ["MixtralForCausalLM"]})
    assert get_config(path)["num_local_experts"] == 8


def test_keys_of_others_are_kept(tmp_path: Path) -> None:
    kinds = {"full": [0, 1], "window": [2]}
    path = write_config(tmp_path, {"model_type": "qwen2", "hybrid_attention_layers": kinds})
    assert get_config(path)["hybrid_attention_layers"] == kinds


def test_text_part_of_a_multimodal_config(tmp_path: Path) -> None:
    """Published Gemma 3 configs say little in text_config and leave the rest to defaults."""
    path = write_config(
        tmp_path,
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
        },
    )
    config = get_config(path)
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["lifted_from"] == "gemma3"
    assert (config["hidden_size"], config["num_hidden_layers"]) == (2560, 34)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 4)
    assert (config["vocab_size"], config["head_dim"]) == (262208, 256)
    assert config["eos_token_id"] == [1, 106] and config["dtype"] == "bfloat16"
    assert config["layer_types"].count("full_attention") == 5
    assert config["rope_parameters"]["full_attention"] == {
        "rope_type": "linear",
        "rope_theta": 1e6,
        "factor": 8.0,
    }
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 1e4
    assert "text_config" not in config and "vision_config" not in config


def test_a_family_without_a_row_goes_through_transformers(tmp_path: Path) -> None:
    path = write_config(
        tmp_path, {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "rope_theta": 3e5}
    )
    config = get_config(path)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 3e5}
    assert config["num_key_value_heads"] == 32


def test_a_family_that_nobody_knows_stays_raw(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"model_type": "toy", "architectures": ["Toy"], "width": 3})
    assert get_config(path)["width"] == 3


@pytest.fixture
def remote_code(tmp_path: Path) -> str:
    (tmp_path / "configuration_toy.py").write_text(
        "from transformers import PretrainedConfig\n"
        "class ToyConfig(PretrainedConfig):\n"
        "    model_type = 'toy'\n"
        "    def __init__(self, width=1, **kwargs):\n"
        "        super().__init__(**kwargs)\n"
        "        self.width, self.doubled = width, 2 * width\n"
    )
    auto_map = {"AutoConfig": "configuration_toy.ToyConfig"}
    return write_config(
        tmp_path,
        {"model_type": "toy", "architectures": ["Toy"], "width": 3, "auto_map": auto_map},
    )


def test_code_of_a_checkpoint_runs_if_trusted(
    remote_code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert get_config(remote_code, trust_remote_code=True)["doubled"] == 6


def test_code_of_a_checkpoint_does_not_run_untrusted(remote_code: str) -> None:
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        get_config(remote_code)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "names 1 layers.*is 26"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "encoder"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "wild", "factor": 2}}, "'wild'"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        get_config(write_config(tmp_path, config))


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"no config\.json.*model\.gguf"):
        get_config(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_broken_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json"):
        get_config(str(tmp_path))


@pytest.mark.parametrize("model", ["/no/such/place", "./here", "a/b/c", "~nobody/x"])
def test_a_path_that_does_not_exist_is_refused_without_network(model: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        get_config(model)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"something")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        get_config(str(path))


def test_generation_config(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"eos_token_id": [1, 2]}, name="generation_config.json")
    assert get_generation_config(path) == {"eos_token_id": [1, 2]}
    assert get_generation_config(write_config(tmp_path / "none", {})) == {}


def test_reading_a_known_family_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"model_type": "gemma3_text"})
    code = (
        "import sys; from vllm.transformers_utils.config import get_config; "
        "from vllm.transformers_utils.dtype import checkpoint_dtype; from pathlib import Path; "
        f"checkpoint_dtype(get_config({path!r}), Path({path!r})); "
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
