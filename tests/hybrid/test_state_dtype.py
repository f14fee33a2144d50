"""The element type of recurrent states: who decides, and that the cache follows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.hybrid.engines import write_json
from vllm import EngineArgs
from vllm.config.model import ModelConfig
from vllm.errors import ConfigError
from vllm.hybrid import state_dtype
from vllm.hybrid.state_dtype import decide_state_dtype, read_state_dtype
from vllm.types import DType
from vllm.worker.imagined_model import imagine_model

NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "vocab_size": 96,
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "n_groups": 2, "ssm_state_size": 24, "hybrid_override_pattern": "M*-", "torch_dtype": "float32",
}  # fmt: skip


def decide(config: dict[str, Any], requested: str, device: str = "cuda") -> DType:
    model = ModelConfig(model="m", tokenizer="m", max_model_len=8, hf_config=config)
    return read_state_dtype(decide_state_dtype(model, requested, device).hf_config)


@pytest.mark.parametrize("key", ["mamba_ssm_cache_dtype", "mamba_ssm_dtype"])
def test_the_flag_wins_over_the_checkpoint(key: str) -> None:
    config = {key: "bfloat16"}
    assert decide(config, "auto") is DType.BFLOAT16
    assert decide(config, "float32") is DType.FLOAT32
    assert decide(config, "float16") is DType.FLOAT16
    assert config == {key: "bfloat16"}, "the given config stays"


@pytest.mark.parametrize(
    "config", [{}, {"mamba_ssm_cache_dtype": None}, {"mamba_ssm_dtype": "auto"}]
)
def test_float32_where_nobody_says_else(config: dict[str, Any]) -> None:
    assert decide(config, "auto") is DType.FLOAT32
    assert decide({"mamba_ssm_cache_dtype": "torch.bfloat16"}, "auto") is DType.BFLOAT16


def test_a_cpu_keeps_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(state_dtype, "warn_once", lambda _, message: said.append(message))
    assert decide({"mamba_ssm_dtype": "bfloat16"}, "float32", "cpu") is DType.FLOAT32
    assert not said
    assert decide({"mamba_ssm_dtype": "bfloat16"}, "auto", "cpu") is DType.FLOAT32
    assert "asks for states in bfloat16" in said[0]
    with pytest.raises(ConfigError, match="'bfloat16', but a CPU keeps states in float32 only"):
        decide({}, "bfloat16", "cpu")


@pytest.mark.parametrize("requested", ["int8", "uint8", "half"])
def test_other_types_are_refused(requested: str) -> None:
    allowed = "allowed: auto, float32, bfloat16, float16"
    with pytest.raises(ConfigError, match=f"'{requested}' is not served; {allowed}"):
        decide({}, requested)
    with pytest.raises(ConfigError, match=f"'{requested}' is not served"):
        decide({"mamba_ssm_cache_dtype": requested}, "auto")


@pytest.mark.parametrize(("requested", "itemsize"), [("auto", 4), ("bfloat16", 2)])
def test_the_cache_is_planned_with_it(tmp_path: Path, requested: str, itemsize: int) -> None:
    write_json(tmp_path / "config.json", NEMOTRON)
    config = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_engine_config()
    decided = decide_state_dtype(config.model_config, requested, "cuda")
    specs = imagine_model(replace(config, model_config=decided)).cache_specs()
    conv, state = specs[0].fields
    assert state.dtype.itemsize == itemsize
    assert conv.dtype is DType.FLOAT32, "inputs stay what they are"
    assert state.name == "state"


def test_the_flag_reaches_the_config(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {**NEMOTRON, "mamba_ssm_cache_dtype": "bfloat16"})
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True)
    config = args.create_engine_config()
    assert read_state_dtype(config.model_config.hf_config) is DType.FLOAT32, "a CPU's"
    with pytest.raises(ConfigError, match="leave it out"):
        replace(args, mamba_ssm_cache_dtype="float16").create_engine_config()
