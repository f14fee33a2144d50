"""The Prometheus metrics of an engine: names, kinds, buckets, and how statistics become values.

The one file that imports prometheus_client. Used by `engine/metrics.py`; served by the HTTP layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import prometheus_client
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from vllm.engine.metrics import Stats

prometheus_client.disable_created_metrics()

_FINISH_REASONS = ("stop", "length", "abort")
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REQUEST_S = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_N = (1, 2, 5, 10, 20)

_GAUGES = {
    "num_requests_running": "Requests that run now.",
    "num_requests_waiting": "Requests that wait to be processed.",
    "num_requests_swapped": "Requests swapped to the CPU: always 0, preempted ones are recomputed.",
    "gpu_cache_usage_perc": "KV cache held by requests; 1 is all of it.",
    "cpu_cache_usage_perc": "KV cache held on the CPU: always 0.",
    "gpu_prefix_cache_hit_rate": "Prompt tokens found in the prefix cache; -1 if it is off.",
    "cpu_prefix_cache_hit_rate": "Always -1: there is no cache of swapped blocks.",
    "kv_cache_fragmentation": "Bytes of superblocks in use that lie in no block in use; 1 is all.",
    "spec_decode_draft_acceptance_rate": "Always 0: there is no speculative decoding.",
    "spec_decode_efficiency": "Always 0: there is no speculative decoding.",
    "avg_prompt_throughput_toks_per_s": "Prompt tokens a second. Deprecated: use the counter.",
    "avg_generation_throughput_toks_per_s": "Generated tokens a second. Deprecated.",
}
_COUNTERS = {
    "num_preemptions": "Requests that lost their cache blocks and were recomputed.",
    "prompt_tokens": "Prompt tokens processed.",
    "generation_tokens": "Tokens generated.",
    "spec_decode_num_accepted_tokens": "Always 0: there is no speculative decoding.",
    "spec_decode_num_draft_tokens": "Always 0: there is no speculative decoding.",
    "spec_decode_num_emitted_tokens": "Always 0: there is no speculative decoding.",
}


def make_count_buckets(largest: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50 … up to `largest`."""
    buckets: list[int] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > largest:
                return buckets
            buckets.append(digit * power)
        power *= 10


class VllmMetrics:
    """The metrics of one engine, registered under `vllm:`."""

    def __init__(
        self,
        labels: Mapping[str, str],
        max_model_len: int,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Register every metric, in place of those of an earlier engine.

        Args:
            labels: of every metric.
            max_model_len: end of the histograms of token counts.
            registry: None is the library's own.
        """
        self._registry = REGISTRY if registry is None else registry
        _unregister_earlier(self._registry)
        self._labels = dict(labels)
        names = list(labels)
        self._gauges = {n: self._make(Gauge, n, text, names) for n, text in _GAUGES.items()}
        self._counters = {n: self._make(Counter, n, text, names) for n, text in _COUNTERS.items()}
        self._success = self._make(
            Counter, "request_success", "Requests that ended.", [*names, "finished_reason"]
        )
        self._group_blocks = self._make(
            Gauge, "kv_group_blocks", "Blocks of a cache group.", [*names, "group", "state"]
        )
        tokens = make_count_buckets(max_model_len)
        histograms: dict[str, tuple[str, Any]] = {
            "time_to_first_token_seconds": ("Time to the first token.", _FIRST_TOKEN_S),
            "time_per_output_token_seconds": ("Time of each further token.", _TOKEN_S),
            "e2e_request_latency_seconds": ("Time of whole requests.", _REQUEST_S),
            "request_prompt_tokens": ("Prompt tokens of requests.", tokens),
            "request_generation_tokens": ("Generated tokens of requests.", tokens),
            "request_params_n": ("n of requests.", _N),
        }
        self._histograms = {
            name: self._make(Histogram, name, text, names, buckets=buckets)
            for name, (text, buckets) in histograms.items()
        }
        self._start()

    def _make(self, kind: Any, name: str, text: str, labels: list[str], **options: Any) -> Any:
        return kind(f"vllm:{name}", text, labels, registry=self._registry, **options)

    def _start(self) -> None:
        """Show every series from the start, so that nothing is missing before the first request."""
        labels = self._labels
        for metrics in (self._gauges, self._counters, self._histograms):
            for name, metric in metrics.items():
                if labels:  # looked up once, not at every step
                    metrics[name] = metric.labels(**labels)
        for reason in _FINISH_REASONS:
            self._success.labels(**labels, finished_reason=reason)
        for name in ("gpu_prefix_cache_hit_rate", "cpu_prefix_cache_hit_rate"):
            self._gauges[name].set(-1)

    def record(self, stats: Stats) -> None:
        """Take the state now and what the last step brought."""
        for name, value in (
            ("num_requests_running", stats.num_running_sys),
            ("num_requests_waiting", stats.num_waiting_sys),
            ("num_requests_swapped", stats.num_swapped_sys),
            ("gpu_cache_usage_perc", stats.gpu_cache_usage_sys),
            ("cpu_cache_usage_perc", stats.cpu_cache_usage_sys),
            ("gpu_prefix_cache_hit_rate", stats.gpu_prefix_cache_hit_rate),
            ("cpu_prefix_cache_hit_rate", stats.cpu_prefix_cache_hit_rate),
            ("kv_cache_fragmentation", stats.fragmentation_sys),
        ):
            self._gauges[name].set(value)
        for group, blocks in stats.blocks_by_group_sys.items():
            for state, count in blocks.items():
                self._group_blocks.labels(**self._labels, group=group, state=state).set(count)
        for name, count in (
            ("num_preemptions", stats.num_preemption_iter),
            ("prompt_tokens", stats.num_prompt_tokens_iter),
            ("generation_tokens", stats.num_generation_tokens_iter),
        ):
            if count:
                self._counters[name].inc(count)
        for name, values in (
            ("time_to_first_token_seconds", stats.time_to_first_tokens_iter),
            ("time_per_output_token_seconds", stats.time_per_output_tokens_iter),
            ("e2e_request_latency_seconds", stats.time_e2e_requests),
            ("request_prompt_tokens", stats.num_prompt_tokens_requests),
            ("request_generation_tokens", stats.num_generation_tokens_requests),
            ("request_params_n", stats.n_requests),
        ):
            observe = self._histograms[name].observe
            for value in values:
                observe(value)
        for reason in stats.finished_reason_requests:
            self._success.labels(**self._labels, finished_reason=reason).inc()

    def record_throughput(self, prompt: float, generation: float) -> None:
        """Take tokens a second."""
        self._gauges["avg_prompt_throughput_toks_per_s"].set(prompt)
        self._gauges["avg_generation_throughput_toks_per_s"].set(generation)

    def record_cache_config(self, facts: Mapping[str, str]) -> None:
        """Show the cache's configuration as labels of a gauge that is 1."""
        gauge = self._make(Gauge, "cache_config_info", "The cache's configuration.", list(facts))
        gauge.labels(**facts).set(1)


def _unregister_earlier(registry: CollectorRegistry) -> None:
    """Take the metrics of an earlier engine out: one process shows one engine."""
    known: dict[str, Any] = registry._names_to_collectors  # the library has no public way
    for collector in {id(c): c for name, c in known.items() if name.startswith("vllm:")}.values():
        registry.unregister(collector)
