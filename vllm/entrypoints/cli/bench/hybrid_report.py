"""How `vllm bench hybrid` shows its result: a table, and a chart where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm.errors import ConfigError

_GIB = 2**30
_BARS = (
    ("tokens_per_s", "tokens a second"),
    ("p99_token_ms", "P99 of a token, ms"),
    ("peak_running", "requests that ran at once"),
)

Row = tuple[str, Callable[[Mapping[str, Any]], float], str]


def format_table(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the comparison: vanilla, hybrid, change."""
    yield (
        f"{result['model']}: {result['input_len']} tokens in, {result['output_len']} out, "
        f"max_model_len {result['max_model_len']}, {result['dtype']}"
    )
    yield ""
    yield f"{'':<36}{'vanilla':>12}{'hybrid':>12}{'change':>10}"
    ways = (result["vanilla"], result["hybrid"])
    rows: tuple[Row, ...] = (
        ("cache, GiB", lambda way: way["cache_bytes"] / _GIB, ".2f"),
        ("weights, GiB", lambda way: way["weight_bytes"] / _GIB, ".2f"),
        ("MiB of a full sequence", lambda way: way["bytes_per_sequence"] / 2**20, ".2f"),
        ("full sequences at once", lambda way: way["max_concurrency"], ".2f"),
    )
    for title, read, form in rows:
        yield _format_row(title, read(ways[0]), read(ways[1]), form)
    for size in ways[0]["batches"]:
        yield ""
        yield f"batch of {size}"
        for key, title, scale, form in (
            ("tokens_per_s", "tokens a second", 1.0, ".1f"),
            ("decode_tokens_per_s", "same, past all prompts", 1.0, ".1f"),
            ("p50_token_ms", "P50 of a token, ms", 1.0, ".2f"),
            ("p99_token_ms", "P99 of a token, ms", 1.0, ".2f"),
            ("p50_first_token_ms", "P50 of the first token, ms", 1.0, ".1f"),
            ("p99_first_token_ms", "P99 of the first token, ms", 1.0, ".1f"),
            ("kv_held_bytes", "cache held at most, MiB", 2**-20, ".2f"),
            ("kv_unreadable_share", "of it no step can read, %", 100.0, ".1f"),
            ("peak_running", "requests that ran at once", 1.0, ".0f"),
            ("num_preemptions", "preemptions", 1.0, ".0f"),
        ):
            before, after = (way["batches"][size][key] * scale for way in ways)
            yield _format_row("  " + title, before, after, form)


def _format_row(title: str, before: float, after: float, form: str) -> str:
    change = f"{(after / before - 1):+.1%}" if before else ""
    return f"{title:<36}{before:>12{form}}{after:>12{form}}{change:>10}"


def draw_chart(result: Mapping[str, Any], path: Path) -> None:
    """Draw throughput, P99 and held cache of every batch as bars, as a PNG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: PLC0415  optional, and slow
    except ModuleNotFoundError:
        raise ConfigError(
            "--output-png needs matplotlib: pip install 'vllm-hybrid[bench]', or leave it out"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    sizes = list(result["vanilla"]["batches"])
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
    for axis, (key, title) in zip(axes, _BARS, strict=True):
        for offset, way in ((-0.2, "vanilla"), (0.2, "hybrid")):
            heights = [result[way]["batches"][size][key] for size in sizes]
            places = [number + offset for number in range(len(sizes))]
            axis.bar(places, heights, width=0.4, label=way)
        axis.set_xticks(range(len(sizes)), sizes)
        axis.set_xlabel("requests")
        axis.set_title(title)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="upper right", ncols=2)
    figure.suptitle(f"{result['input_len']} tokens in, {result['output_len']} out")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
