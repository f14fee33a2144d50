"""In which element type recurrent states are kept: the flag, the checkpoint, the device.

Called by engine/arg_utils.py, once an engine. What was decided stands in the model's config, where
its layers read it (`read_state_dtype`); arithmetic is in float32 whatever that is. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.config.model import ModelConfig
from vllm.errors import ConfigError
from vllm.logger import init_logger, warn_once
from vllm.types import DType

logger = init_logger(__name__)

STATE_DTYPE_KEY = "mamba_ssm_cache_dtype"
_OTHER_KEY = "mamba_ssm_dtype"  # of Qwen3.5
_ALLOWED = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
_AUTO = "auto"


def read_state_dtype(config: Mapping[str, Any]) -> DType:
    """Return what a model's config says its recurrent states are kept in; else float32.

    Raises:
        ConfigError: it is no type that states can have.
    """
    named = config.get(STATE_DTYPE_KEY) or config.get(_OTHER_KEY) or _AUTO
    if named == _AUTO:
        return DType.FLOAT32
    return _parse(str(named).removeprefix("torch."))


def decide_state_dtype(model: ModelConfig, requested: str, device: str) -> ModelConfig:
    """Return the model's config with the element type of states that the engine uses.

    Args:
        model: as the checkpoint has it.
        requested: `--mamba-ssm-cache-dtype`; auto is what the checkpoint says, else float32.
        device: kind of device; a CPU keeps float32.

    Raises:
        ConfigError: the type is unknown, or the device lacks it.
    """
    dtype = read_state_dtype(model.hf_config) if requested == _AUTO else _parse(requested)
    if device == "cpu" and dtype is not DType.FLOAT32:
        if requested != _AUTO:
            raise ConfigError(
                f"mamba_ssm_cache_dtype is {requested!r}, but a CPU keeps states in float32 only; "
                "leave it out"
            )
        warn_once(
            logger,
            f"The checkpoint asks for states in {dtype.value}; a CPU keeps them in float32.",
        )
        dtype = DType.FLOAT32
    if dtype is read_state_dtype(model.hf_config):
        return model
    return replace(model, hf_config={**model.hf_config, STATE_DTYPE_KEY: dtype.value})


def _parse(name: str) -> DType:
    allowed = {dtype.value: dtype for dtype in _ALLOWED}
    if name not in allowed:
        raise ConfigError(
            f"mamba_ssm_cache_dtype {name!r} is not served; allowed: {_AUTO}, {', '.join(allowed)}"
        )
    return allowed[name]
