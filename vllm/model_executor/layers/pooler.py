"""Pooling of hidden states into embeddings: named, not served."""

from __future__ import annotations

from enum import IntEnum
from typing import NoReturn

from vllm.errors import ConfigError


class PoolingType(IntEnum):
    """Ways to pool."""

    LAST = 0
    ALL = 1


class Pooler:
    """Refuses to be made."""

    def __init__(self, pooling_type: PoolingType, normalize: bool) -> None:
        raise ConfigError("embedding models are not served, so there is nothing to pool")

    def forward(self, hidden_states: object, pooling_metadata: object) -> NoReturn:
        """Never reached."""
        raise ConfigError("embedding models are not served")
