"""From timed requests to the numbers of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.cli.bench.load_client import RequestResult
from vllm.entrypoints.cli.bench.summary import describe_times

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_WIDTH = 50


def make_report(
    results: Sequence[RequestResult],
    duration_s: float,
    tokenizer: PreTrainedTokenizerBase,
    metrics: Sequence[str],
    ranks: Sequence[float],
    goals: Mapping[str, float],
) -> dict[str, Any]:
    """Return the result file's measured fields; failed requests count in `errors` only.

    Generated tokens are counted by the server where it says, else by tokenising the text.

    Args:
        results: one for each request.
        duration_s: of the whole load.
        tokenizer: of the model.
        metrics: which times are described.
        ranks: by which percentiles.
        goals: metric -> milliseconds; requests within all of them count as goodput. Empty leaves
            goodput out.
    """
    lens = [_count_output(r, tokenizer) if r.is_success else 0 for r in results]
    good = [(r, n) for r, n in zip(results, lens, strict=True) if r.is_success]
    num_input, num_output = sum(r.prompt_len for r, _ in good), sum(n for _, n in good)
    seconds = {
        "ttft": [r.ttft for r, _ in good],
        "tpot": [(r.latency - r.ttft) / (n - 1) for r, n in good if n > 1],
        "itl": [gap for r, _ in good for gap in r.itl],
        "e2el": [r.latency for r, _ in good],
    }
    report: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "input_lens": [r.prompt_len for r in results],
        "output_lens": lens,
        "ttfts": [r.ttft for r in results],
        "itls": [r.itl for r in results],
        "generated_texts": [r.generated_text for r in results],
        "errors": [r.error for r in results],
    }
    if goals:
        num_within = sum(_is_within(r, n, goals) for r, n in good)
        report["request_goodput"] = num_within / duration_s
    for metric in metrics:
        report.update(describe_times(metric, seconds[metric], ranks))
    return report


def _is_within(result: RequestResult, output_len: int, goals: Mapping[str, float]) -> bool:
    """Whether a request met every goal; one of a single token has no time between tokens."""
    times_s = {
        "ttft": result.ttft,
        "tpot": (result.latency - result.ttft) / max(1, output_len - 1),
        "e2el": result.latency,
    }
    return all(1e3 * times_s[metric] <= limit_ms for metric, limit_ms in goals.items())


def _count_output(result: RequestResult, tokenizer: PreTrainedTokenizerBase) -> int:
    if result.output_len is not None:
        return result.output_len
    return len(tokenizer.encode(result.generated_text, add_special_tokens=False))


def print_report(report: Mapping[str, Any], metrics: Sequence[str], ranks: Sequence[float]) -> None:
    """Print the table."""
    print(f"{' Serving Benchmark Result ':=^{_WIDTH}}")
    for title, key, digits in (
        ("Successful requests:", "completed", 0),
        ("Benchmark duration (s):", "duration", 2),
        ("Total input tokens:", "total_input_tokens", 0),
        ("Total generated tokens:", "total_output_tokens", 0),
        ("Request throughput (req/s):", "request_throughput", 2),
        ("Output token throughput (tok/s):", "output_throughput", 2),
        ("Total Token throughput (tok/s):", "total_token_throughput", 2),
    ):
        print(f"{title:<40} {report[key]:<10.{digits}f}")
    if "request_goodput" in report:
        print(f"{'Request goodput (req/s):':<40} {report['request_goodput']:<10.2f}")
    for metric in metrics:
        print(f"{_TITLES[metric]:-^{_WIDTH}}")
        name = metric.upper()
        print(f"{f'Mean {name} (ms):':<40} {report[f'mean_{metric}_ms']:<10.2f}")
        print(f"{f'Median {name} (ms):':<40} {report[f'median_{metric}_ms']:<10.2f}")
        for rank in ranks:
            print(f"{f'P{rank:g} {name} (ms):':<40} {report[f'p{rank:g}_{metric}_ms']:<10.2f}")
    print("=" * _WIDTH)
