"""A kind of layer that a family does not have is refused, whatever the family."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hybrid.models.families import HYBRID_WRITERS
from vllm import EngineArgs
from vllm.errors import ConfigError
from vllm.model_executor.model_loader.loader import get_model_architecture
from vllm.model_executor.models.causal_lm import CausalLM


@pytest.mark.parametrize("name", HYBRID_WRITERS)
def test_an_unknown_layer_type_is_refused(name: str, tmp_path: Path) -> None:
    HYBRID_WRITERS[name](tmp_path)
    made = EngineArgs(
        model=str(tmp_path), device="cpu", skip_tokenizer_init=True, max_model_len=64
    ).create_engine_config()
    config = made.model_config.hf_config
    if not config.get("layer_types"):
        pytest.skip("its config says by other words what its layers are")
    cls, _ = get_model_architecture(made.model_config)
    assert issubclass(cls, CausalLM)
    cls.read_shape(config)
    types = [*config["layer_types"][:-1], "conv_attention"]
    with pytest.raises(ConfigError, match=f"layer {len(types) - 1} .*'conv_attention'.*allowed"):
        cls.read_shape({**config, "layer_types": types})
