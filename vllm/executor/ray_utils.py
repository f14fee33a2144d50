"""Ranks as Ray actors: not served by this version."""

from __future__ import annotations

from typing import NoReturn

from vllm.config import ParallelConfig
from vllm.errors import ConfigError


def initialize_ray_cluster(
    parallel_config: ParallelConfig, ray_address: str | None = None
) -> NoReturn:
    """Refuse, and say what serves several ranks."""
    raise ConfigError(
        "Ray clusters are not served by this version; use --distributed-executor-backend mp for "
        "several ranks on one host"
    )
