"""Frozen configuration objects, importable from `vllm.config` as in 0.6.3."""

from vllm.config.cache import CacheConfig
from vllm.config.engine import (
    DecodingConfig,
    DeviceConfig,
    DummyConfig,
    EngineConfig,
    LoadConfig,
    ObservabilityConfig,
)
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.unserved import (
    LoadFormat,
    LoRAConfig,
    MultiModalConfig,
    PromptAdapterConfig,
    SpeculativeConfig,
    TokenizerPoolConfig,
)

__all__ = [
    "CacheConfig",
    "DecodingConfig",
    "DeviceConfig",
    "DummyConfig",
    "EngineConfig",
    "LoRAConfig",
    "LoadConfig",
    "LoadFormat",
    "ModelConfig",
    "MultiModalConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "PromptAdapterConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "TokenizerPoolConfig",
]
