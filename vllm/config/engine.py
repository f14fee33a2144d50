"""The whole configuration of an engine, resolved and frozen."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from vllm.config.cache import CacheConfig
from vllm.config.hybrid import HybridSettings
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Where tensors live: "cpu" or "cuda"."""

    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class DummyConfig:
    """How weights are made up. The defaults are what `--load-format dummy` promises.

    Attributes:
        value_range: numbers are uniform within ± this.
        has_random_norms: norms are drawn like matrices, instead of doing nothing.
        has_one_seed: every tensor begins with the same numbers; else each is drawn by its name.
    """

    value_range: float = 1e-3
    has_random_norms: bool = True
    has_one_seed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How weights are read.

    Attributes:
        load_format: auto, safetensors, pt, gguf or dummy.
        use_tqdm: whether a progress bar is shown.
        dummy: for load_format dummy.
    """

    load_format: str = "auto"
    download_dir: str | None = None
    ignore_patterns: tuple[str, ...] = ()
    use_tqdm: bool = True
    dummy: DummyConfig = field(default_factory=DummyConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingConfig:
    """Structured output."""

    guided_decoding_backend: str = "llguidance"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    """Statistics and traces."""

    log_stats: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an engine process needs to start; travels pickled to it."""

    model_config: ModelConfig
    cache_config: CacheConfig
    parallel_config: ParallelConfig
    scheduler_config: SchedulerConfig
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)
    decoding_config: DecodingConfig = field(default_factory=DecodingConfig)
    observability_config: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    hybrid: HybridSettings = field(default_factory=HybridSettings)

    def to_dict(self) -> dict[str, Any]:
        """Return the configs as nested dicts."""
        return asdict(self)
