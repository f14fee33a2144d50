"""Statistics as log lines and as Prometheus metrics, with the names of 0.6.3.

A `StatRecorder` gets every step's counts and hands them to the loggers: the log speaks every few
seconds, Prometheus takes each step. Gauges describe now: they follow the engine's latest report,
so that nothing freezes when requests are aborted. No torch.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.config import CacheConfig
from vllm.engine.stats import EngineStats, IterationStats
from vllm.logger import init_logger

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = init_logger(__name__)

LOG_INTERVAL_S = 5.0


@dataclass(slots=True, kw_only=True)
class Stats:
    """What a logger gets: the state now, and what happened since its last call.

    Field names are those of 0.6.3: `_sys` is the system's state, `_iter` belongs to the steps,
    `_requests` to requests that ended.
    """

    now: float
    num_running_sys: int = 0
    num_waiting_sys: int = 0
    num_swapped_sys: int = 0
    gpu_cache_usage_sys: float = 0.0
    cpu_cache_usage_sys: float = 0.0
    cpu_prefix_cache_hit_rate: float = -1.0
    gpu_prefix_cache_hit_rate: float = -1.0
    num_prompt_tokens_iter: int = 0
    num_generation_tokens_iter: int = 0
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    time_per_output_tokens_iter: list[float] = field(default_factory=list)
    num_preemption_iter: int = 0
    time_e2e_requests: list[float] = field(default_factory=list)
    num_prompt_tokens_requests: list[int] = field(default_factory=list)
    num_generation_tokens_requests: list[int] = field(default_factory=list)
    n_requests: list[int] = field(default_factory=list)
    finished_reason_requests: list[str] = field(default_factory=list)
    spec_decode_metrics: None = None
    fragmentation_sys: float = 0.0
    blocks_by_group_sys: dict[str, dict[str, int]] = field(default_factory=dict)


def make_stats(engine: EngineStats, steps: IterationStats, num_preemptions: int) -> Stats:
    """Return the state of `engine` with what `steps` brought and so many new preemptions."""
    return Stats(
        now=time.time(),
        num_running_sys=engine.num_running_requests,
        num_waiting_sys=engine.num_waiting_requests,
        gpu_cache_usage_sys=engine.gpu_cache_usage,
        gpu_prefix_cache_hit_rate=engine.gpu_prefix_cache_hit_rate,
        num_prompt_tokens_iter=steps.num_prompt_tokens,
        num_generation_tokens_iter=steps.num_generation_tokens,
        time_to_first_tokens_iter=steps.times_to_first_token_s,
        time_per_output_tokens_iter=steps.times_per_output_token_s,
        num_preemption_iter=num_preemptions,
        time_e2e_requests=[r.latency_s for r in steps.finished],
        num_prompt_tokens_requests=[r.num_prompt_tokens for r in steps.finished],
        num_generation_tokens_requests=[r.num_generation_tokens for r in steps.finished],
        n_requests=[r.n for r in steps.finished],
        finished_reason_requests=[r.reason.value for r in steps.finished],
        fragmentation_sys=engine.fragmentation,
        blocks_by_group_sys=engine.blocks_by_group,
    )


class StatLoggerBase(ABC):
    """Takes statistics; subclass it for a sink of your own.

    Attributes:
        local_interval: seconds between what the logger says itself.
    """

    def __init__(self, local_interval: float) -> None:
        """Set the interval."""
        self.local_interval = local_interval

    @abstractmethod
    def log(self, stats: Stats) -> None:
        """Take the state now and what the last step brought."""

    @abstractmethod
    def info(self, type: str, obj: Any) -> None:
        """Take facts of the start; `type` names them, e.g. "cache_config"."""


class LoggingStatLogger(StatLoggerBase):
    """Writes a line every few seconds while something happens, and one when it has stopped."""

    def __init__(self, local_interval: float = LOG_INTERVAL_S) -> None:
        """Set the interval."""
        super().__init__(local_interval)
        self._since = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._was_quiet = True

    def log(self, stats: Stats) -> None:
        """See `StatLoggerBase.log`."""
        self._num_prompt_tokens += stats.num_prompt_tokens_iter
        self._num_generation_tokens += stats.num_generation_tokens_iter
        now = time.monotonic()
        elapsed_s = now - self._since
        if elapsed_s < self.local_interval:
            return
        is_quiet = not (
            self._num_prompt_tokens
            or self._num_generation_tokens
            or stats.num_running_sys
            or stats.num_waiting_sys
        )
        if not (is_quiet and self._was_quiet):
            self._say(stats, elapsed_s)
        self._was_quiet = is_quiet
        self._since = now
        self._num_prompt_tokens = self._num_generation_tokens = 0

    def _say(self, stats: Stats, elapsed_s: float) -> None:
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Swapped: %d reqs, Pending: %d reqs, GPU KV cache usage: %.1f%%, "
            "CPU KV cache usage: %.1f%%.",
            self._num_prompt_tokens / elapsed_s,
            self._num_generation_tokens / elapsed_s,
            stats.num_running_sys,
            stats.num_swapped_sys,
            stats.num_waiting_sys,
            100 * stats.gpu_cache_usage_sys,
            100 * stats.cpu_cache_usage_sys,
        )
        if stats.gpu_prefix_cache_hit_rate >= 0:
            logger.info(
                "Prefix cache hit rate: GPU: %.2f%%, CPU: 0.00%%",
                100 * stats.gpu_prefix_cache_hit_rate,
            )

    def info(self, type: str, obj: Any) -> None:
        """See `StatLoggerBase.info`; nothing is logged, the engine says it at its start."""


class PrometheusStatLogger(StatLoggerBase):
    """Keeps the metrics that /metrics shows."""

    def __init__(
        self,
        local_interval: float = LOG_INTERVAL_S,
        labels: Mapping[str, str] | None = None,
        max_model_len: int = 2**20,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Register the metrics, in place of those of an earlier engine of this process.

        Args:
            local_interval: seconds over which the deprecated throughput gauges average.
            labels: of every metric, `model_name` as a rule.
            max_model_len: end of the histograms of token counts.
            registry: None is the library's own, which /metrics shows.
        """
        from vllm.engine.prometheus import VllmMetrics  # noqa: PLC0415  only where it is used

        super().__init__(local_interval)
        self.metrics = VllmMetrics(labels or {}, max_model_len, registry)
        self._since = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0

    def log(self, stats: Stats) -> None:
        """See `StatLoggerBase.log`."""
        self.metrics.record(stats)
        self._num_prompt_tokens += stats.num_prompt_tokens_iter
        self._num_generation_tokens += stats.num_generation_tokens_iter
        now = time.monotonic()
        if now - self._since >= self.local_interval:
            elapsed_s = now - self._since
            self.metrics.record_throughput(
                self._num_prompt_tokens / elapsed_s,
                self._num_generation_tokens / elapsed_s,
            )
            self._since = now
            self._num_prompt_tokens = self._num_generation_tokens = 0

    def info(self, type: str, obj: Any) -> None:
        """See `StatLoggerBase.info`."""
        if type == "cache_config":
            self.metrics.record_cache_config(obj)


class StatRecorder:
    """Hands every step's statistics to the loggers of one engine."""

    def __init__(self, loggers: dict[str, StatLoggerBase]) -> None:
        """Take the loggers by name; an empty dict records nothing."""
        self.loggers = loggers
        self._num_preemptions = 0

    def add(self, name: str, stat_logger: StatLoggerBase) -> None:
        """Give statistics to one more logger; KeyError if the name is taken."""
        if name in self.loggers:
            raise KeyError(f"there is a logger named {name!r} already")
        self.loggers[name] = stat_logger

    def remove(self, name: str) -> None:
        """Stop giving statistics to a logger; KeyError if there is none of that name."""
        if name not in self.loggers:
            raise KeyError(f"there is no logger named {name!r}; known: {sorted(self.loggers)}")
        del self.loggers[name]

    def record(self, engine: EngineStats, steps: IterationStats) -> None:
        """Take the state of the engine and what happened since the last call."""
        if not self.loggers:
            return
        fresh = max(0, engine.num_preemptions - self._num_preemptions)
        self._num_preemptions = engine.num_preemptions
        stats = make_stats(engine, steps, fresh)
        for stat_logger in self.loggers.values():
            stat_logger.log(stats)


def make_default_loggers(model_name: str, max_model_len: int) -> dict[str, StatLoggerBase]:
    """Return the log and Prometheus, as an engine has them unless told otherwise."""
    return {
        "logging": LoggingStatLogger(),
        "prometheus": PrometheusStatLogger(
            labels={"model_name": model_name}, max_model_len=max_model_len
        ),
    }


def describe_cache_config(config: CacheConfig, num_gpu_blocks: int) -> dict[str, str]:
    """Return the labels of `cache_config_info`."""
    return {
        "block_size": str(config.block_size),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "swap_space_bytes": str(config.swap_space_bytes),
        "num_gpu_blocks_override": str(config.num_gpu_blocks_override),
        "cache_dtype": "auto" if config.cache_dtype is None else config.cache_dtype.value,
        "is_attention_free": "False",
        "sliding_window": "None",
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "cpu_offload_gb": str(config.cpu_offload_gb),
        "num_gpu_blocks": str(num_gpu_blocks),
        "num_cpu_blocks": "0",
    }
