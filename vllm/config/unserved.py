"""Configuration names of 0.6.3 for what this engine does not serve.

They import from their old path; making one says why it is of no use. LoadFormat is plain data.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from vllm.errors import ConfigError


class LoadFormat(StrEnum):
    """Formats of weight files that are served."""

    AUTO = "auto"
    PT = "pt"
    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    DUMMY = "dummy"


class _Unserved:
    """Raises ConfigError when it is made."""

    reason = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(f"{type(self).__name__}: {self.reason}")


class LoRAConfig(_Unserved):
    """Adapters."""

    reason = "LoRA adapters are not served; merge the adapter into the model"


class PromptAdapterConfig(_Unserved):
    """Prompt adapters."""

    reason = "prompt adapters are not served"


class SpeculativeConfig(_Unserved):
    """Speculative decoding."""

    reason = "speculative decoding is not served"


class MultiModalConfig(_Unserved):
    """Images and sound."""

    reason = "only text models are served"


class TokenizerPoolConfig(_Unserved):
    """Tokenising in other processes."""

    reason = "tokenising needs no pool"
