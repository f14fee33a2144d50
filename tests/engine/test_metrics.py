"""Statistics to log lines and metrics: every name of 0.6.3, gauges of now, counters of all time."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from vllm.config import CacheConfig
from vllm.engine.messages import (
    CacheGroup,
    CoreStats,
    EngineReady,
    GroupUsage,
    LayerKernelReport,
)
from vllm.engine.metrics import (
    LoggingStatLogger,
    PrometheusStatLogger,
    StatLoggerBase,
    StatRecorder,
    describe_cache_config,
)
from vllm.engine.prometheus import make_count_buckets
from vllm.engine.stats import EngineStats, FinishedRequest, IterationStats, make_engine_stats
from vllm.types import FinishReason

GAUGES = """num_requests_running num_requests_waiting num_requests_swapped gpu_cache_usage_perc
cpu_cache_usage_perc gpu_prefix_cache_hit_rate cpu_prefix_cache_hit_rate
spec_decode_draft_acceptance_rate spec_decode_efficiency
avg_prompt_throughput_toks_per_s avg_generation_throughput_toks_per_s"""
COUNTERS = """num_preemptions_total prompt_tokens_total generation_tokens_total
spec_decode_num_accepted_tokens_total spec_decode_num_draft_tokens_total
spec_decode_num_emitted_tokens_total"""
HISTOGRAMS = """time_to_first_token_seconds time_per_output_token_seconds
e2e_request_latency_seconds request_prompt_tokens request_generation_tokens request_params_n"""
LABELS = {"model_name": "m"}


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"vllm:{name}", {**LABELS, **labels})


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_every_name_is_there_from_the_start(registry: CollectorRegistry) -> None:
    made = PrometheusStatLogger(labels=LABELS, max_model_len=64, registry=registry)
    made.info("cache_config", describe_cache_config(CacheConfig(), 12))
    for name in GAUGES.split():
        expected = -1 if "hit_rate" in name else 0
        assert value(registry, name) == expected, name
    for name in COUNTERS.split():
        assert value(registry, name) == 0, name
    for name in HISTOGRAMS.split():
        assert value(registry, name + "_count") == 0, name
    for reason in ("stop", "length", "abort"):
        assert value(registry, "request_success_total", finished_reason=reason) == 0
    text = generate_latest(registry).decode()
    assert "_created" not in text
    (line,) = [t for t in text.splitlines() if t.startswith("vllm:cache_config_info{")]
    assert 'num_gpu_blocks="12"' in line
    assert 'enable_prefix_caching="True"' in line
    assert line.endswith(" 1.0")


def test_buckets(registry: CollectorRegistry) -> None:
    assert make_count_buckets(64) == [1, 2, 5, 10, 20, 50]
    PrometheusStatLogger(labels=LABELS, max_model_len=64, registry=registry)
    assert value(registry, "request_prompt_tokens_bucket", le="50.0") == 0
    assert value(registry, "request_prompt_tokens_bucket", le="100.0") is None
    assert value(registry, "time_to_first_token_seconds_bucket", le="0.06") == 0
    assert value(registry, "request_params_n_bucket", le="20.0") == 0


def test_steps_become_values(registry: CollectorRegistry) -> None:
    logger = PrometheusStatLogger(0.0, labels=LABELS, max_model_len=64, registry=registry)
    recorder = StatRecorder({"prometheus": logger})
    finished = FinishedRequest(
        reason=FinishReason.ABORT, num_prompt_tokens=7, num_generation_tokens=3, n=2, latency_s=1.5
    )
    steps = IterationStats(
        num_prompt_tokens=7,
        num_generation_tokens=3,
        times_to_first_token_s=[0.05],
        times_per_output_token_s=[0.02, 0.03],
        finished=[finished],
    )
    busy = EngineStats(
        num_running_requests=4, num_waiting_requests=2, gpu_cache_usage=0.5,
        gpu_prefix_cache_hit_rate=0.25, num_preemptions=3,
    )  # fmt: skip
    recorder.record(busy, steps)
    recorder.record(busy, IterationStats())
    assert value(registry, "num_requests_running") == 4
    assert value(registry, "num_requests_waiting") == 2
    assert value(registry, "gpu_cache_usage_perc") == 0.5
    assert value(registry, "gpu_prefix_cache_hit_rate") == 0.25
    assert value(registry, "num_preemptions_total") == 3, "counted once"
    assert value(registry, "prompt_tokens_total") == 7
    assert value(registry, "generation_tokens_total") == 3
    assert value(registry, "time_per_output_token_seconds_count") == 2
    assert value(registry, "e2e_request_latency_seconds_sum") == 1.5
    assert value(registry, "request_params_n_sum") == 2
    assert value(registry, "request_success_total", finished_reason="abort") == 1
    recorder.record(EngineStats(), IterationStats())
    assert value(registry, "num_requests_running") == 0, "gauges describe now"


def test_a_later_engine_takes_the_place_of_an_earlier_one(registry: CollectorRegistry) -> None:
    PrometheusStatLogger(labels=LABELS, registry=registry)
    PrometheusStatLogger(labels={"model_name": "other"}, registry=registry)
    assert value(registry, "num_requests_running") is None
    assert registry.get_sample_value("vllm:num_requests_running", {"model_name": "other"}) == 0
    PrometheusStatLogger(registry=registry)
    assert registry.get_sample_value("vllm:num_requests_running") == 0


def test_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    recorder = StatRecorder({"logging": LoggingStatLogger(0.0)})
    with caplog.at_level(logging.INFO, "vllm"):
        recorder.record(EngineStats(), IterationStats())
        assert caplog.messages == [], "nothing has happened yet"
        busy = EngineStats(
            num_running_requests=2, num_waiting_requests=1, gpu_cache_usage=0.25,
            gpu_prefix_cache_hit_rate=0.5,
        )  # fmt: skip
        recorder.record(busy, IterationStats(num_generation_tokens=5))
        first, second = caplog.messages
        assert (
            "Running: 2 reqs, Swapped: 0 reqs, Pending: 1 reqs, GPU KV cache usage: 25.0%" in first
        )
        assert "generation throughput: 0.0" not in first
        assert second == "Prefix cache hit rate: GPU: 50.00%, CPU: 0.00%"
        recorder.record(EngineStats(), IterationStats())
        assert "Running: 0 reqs" in caplog.messages[-1], "it says once that all is quiet"
        num_lines = len(caplog.messages)
        recorder.record(EngineStats(), IterationStats())
        assert len(caplog.messages) == num_lines


def test_log_waits_for_its_interval(caplog: pytest.LogCaptureFixture) -> None:
    recorder = StatRecorder({"logging": LoggingStatLogger(60.0)})
    with caplog.at_level(logging.INFO, "vllm"):
        recorder.record(EngineStats(num_running_requests=1), IterationStats(num_prompt_tokens=1))
    assert caplog.messages == []


def test_loggers_of_ones_own() -> None:
    class Mine(StatLoggerBase):
        def __init__(self) -> None:
            super().__init__(1.0)
            self.seen: list = []

        def log(self, stats) -> None:
            self.seen.append(stats)

        def info(self, type, obj) -> None:
            self.seen.append((type, obj))

    recorder, mine = StatRecorder({}), Mine()
    recorder.add("mine", mine)
    with pytest.raises(KeyError, match="already"):
        recorder.add("mine", mine)
    recorder.record(EngineStats(num_running_requests=1), IterationStats(num_prompt_tokens=2))
    (stats,) = mine.seen
    assert (stats.num_running_sys, stats.num_prompt_tokens_iter) == (1, 2)
    recorder.remove("mine")
    with pytest.raises(KeyError, match="no logger"):
        recorder.remove("mine")


def test_engine_stats() -> None:
    ready = EngineReady(
        kernels=[LayerKernelReport(layer=0, kernel="cpu", note="asked for x")],
        groups=[], num_cache_tokens=160, num_gpu_blocks=10, block_tokens=16, cache_bytes=1,
        weight_bytes=2, load_seconds=0.5, startup={"superblock_bytes": 1200},
        cache_groups=[
            CacheGroup(
                name=name, layers=[layer], block_tokens=16, block_bytes=1200 // slots,
                blocks_per_superblock=slots, blocks_per_sequence=4, waste=0.0,
            )
            for layer, (name, slots) in enumerate({"full": 2, "window": 6}.items())
        ],
    )  # fmt: skip
    core = CoreStats(
        num_running=3, num_waiting=1, num_cache_queries=100, num_cache_hits=25,
        cache_usage=0.25, num_free_superblocks=3,
        groups=[
            GroupUsage(
                name="full", num_total_blocks=10, num_used_blocks=3, num_cached_blocks=1,
                num_own_blocks=4,
            ),
            GroupUsage(name="window", num_total_blocks=30, num_used_blocks=6, num_own_blocks=12),
        ],
    )  # fmt: skip
    stats = make_engine_stats(
        core, ready, is_alive=True, has_prefix_caching=True, avg_queue_time_ms=2.0
    )
    # A free superblock gives 3 blocks where sequences of 4 + 4 blocks take 2 2/3 superblocks.
    assert (stats.num_total_gpu_blocks, stats.num_free_gpu_blocks) == (4 + 12 + 3 * 3, 16)
    assert stats.gpu_cache_usage == 0.25
    assert stats.fragmentation == 0.25
    assert stats.cache_groups["window"]["block_bytes"] == 200
    assert stats.gpu_prefix_cache_hit_rate == 0.25
    assert stats.blocks_by_group["full"] == {"total": 10, "used": 3, "cached": 1, "free": 7}
    assert stats.kernels == {0: {"kernel": "cpu", "note": "asked for x"}}
    dead = make_engine_stats(
        core, ready, is_alive=False, has_prefix_caching=False, avg_queue_time_ms=2.0
    )
    assert not dead.scheduler_running
    assert dead.num_running_requests == 0
    assert dead.gpu_prefix_cache_hit_rate == -1
