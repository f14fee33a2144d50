"""What a model keeps and what fits, found without its weights.

Behind `vllm hybrid`. Asks a model without memory for its cache specs; groups and capacity come from
the same functions as at a start.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.cache_spec import KVCacheGroup, LayerCacheSpec
from vllm.config import EngineConfig
from vllm.config.hybrid import HybridSettings
from vllm.core.capacity import CapacityReport, make_layout
from vllm.hybrid.apply import limit_layers, name_specs
from vllm.hybrid.grouping import group_layers
from vllm.worker.imagined_model import imagine_model

VANILLA = HybridSettings()
"""Windows are kept in full; states, which nothing can replace, stay states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """What one way of keeping a cache comes to.

    Attributes:
        groups: with the byte sizes of one rank.
        capacity: what fits into the bytes that were given.
    """

    groups: tuple[KVCacheGroup, ...]
    capacity: CapacityReport


def read_specs(config: EngineConfig, settings: HybridSettings) -> tuple[LayerCacheSpec, ...]:
    """Return what every decoder layer keeps on the first rank.

    Args:
        config: which model, in which element type, over how many ranks.
        settings: policies of the layers; VANILLA has none.
    """
    model = imagine_model(config)
    limit_layers(model.attention_layers(), settings.policies)
    return name_specs(model.cache_specs(), settings.policies)


def plan_cache(config: EngineConfig, settings: HybridSettings, kv_bytes: int) -> CachePlan:
    """Return the groups of a model and what `kv_bytes` of cache on each rank hold.

    Args:
        config: which model, how long its sequences are, how large its steps.
        settings: policies of the layers; VANILLA has none.
        kv_bytes: bytes of one rank's cache.

    Raises:
        ConfigError: not even one block fits.
    """
    groups = group_layers(read_specs(config, settings), settings, config.cache_config.block_size)
    _, capacity = make_layout(
        [groups],
        [kv_bytes],
        max_model_len=config.model_config.max_model_len,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        check_max_model_len=False,
    )
    return CachePlan(groups=groups, capacity=capacity)
