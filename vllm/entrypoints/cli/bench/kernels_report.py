"""How `vllm bench kernels` shows its result: tables, and a chart where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm.errors import ConfigError

_PHASES = ("decode", "prefill")


def format_shape(shape: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of one kind of layer: loads by kernels, then who refused."""
    yield describe_query(shape)
    yield (
        f"  {'phase':<9}{'rows':>6}{'tokens':>8}  {'kernel':<12}{'us':>11}{'GB/s':>9}{'of copy':>9}"
        f"{'GFLOP/s':>10}{'of matmul':>11}"
    )
    for cell in shape["cells"]:
        place = f"  {cell['phase']:<9}{cell['batch_size']:>6}{cell['length']:>8}  "
        ranked = sorted(cell["kernels"].items(), key=lambda item: item[1]["median_us"])
        for name, found in ranked:
            yield (
                f"{place}{name:<12}{found['median_us']:>11.1f}{found['bytes_per_s'] / 1e9:>9.1f}"
                f"{found['share_of_copy']:>9.1%}{found['flops_per_s'] / 1e9:>10.1f}"
                f"{found['share_of_matmul']:>11.1%}{'  graph' if found['is_graph'] else ''}"
            )
        for name, fault in cell["faults"].items():
            yield f"{place}{name:<12}{fault}"
    reasons: dict[str, list[str]] = {}
    for name, reason in shape["refusals"].items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        yield f"  {', '.join(names)}: {reason}"


def describe_query(shape: Mapping[str, Any]) -> str:
    """Return one line that tells a kind of layer from the others."""
    from vllm.attention.selector import format_layers  # noqa: PLC0415  torch

    query = shape["query"]
    parts = [
        f"{query['num_heads']} heads",
        f"{query['num_kv_heads']} KV heads",
        f"head size {query['head_size']}",
    ]
    for name, text in (
        ("window", "window {}"),
        ("sink_tokens", "{} sink tokens"),
        ("has_sink_logits", "sink logits"),
        ("chunk_tokens", "chunks of {}"),
        ("soft_cap", "soft cap {}"),
        ("has_one_field", "keys and values in one"),
    ):
        if query[name]:
            parts.append(text.format(query[name]))
    parts += [query["dtype"].value, f"blocks of {query['block_tokens']}"]
    layers = f"layers {format_layers(shape['layers'])}: " if shape["layers"] else ""
    return layers + ", ".join(parts)


def format_summary(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the machine can do and the order of the kernels."""
    yield f"{result['device_name']}, torch {result['torch']}"
    for dtype, rates in result["rates"].items():
        yield (
            f"copy {rates['copy_bytes_per_s'] / 1e9:.1f} GB/s, "
            f"matmul in {dtype} {rates['matmul_flops_per_s'] / 1e9:.1f} GFLOP/s"
        )
    for entry in result["ranks"]:
        window = "window" if entry["has_window"] else "no window"
        order = sorted(entry["relative_times"].items(), key=lambda item: item[1])
        listed = ", ".join(f"{name} {time:.2f}" for name, time in order)
        yield f"head size {entry['head_size']}, {window}, {entry['dtype'].value}: {listed}"


def draw_chart(result: Mapping[str, Any], path: Path) -> None:
    """Draw the time of every kernel on every load, a row of panels a kind of layer, as a PNG.

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

    shapes = result["shapes"]
    names = dict.fromkeys(n for shape in shapes for c in shape["cells"] for n in c["kernels"])
    colors = {name: f"C{number}" for number, name in enumerate(names)}
    figure, axes = pyplot.subplots(
        len(shapes),
        len(_PHASES),
        figsize=(13, 1 + 3.2 * len(shapes)),
        squeeze=False,
        layout="constrained",
    )
    for shape, row in zip(shapes, axes, strict=True):
        for phase, axis in zip(_PHASES, row, strict=True):
            _draw_panel(axis, [c for c in shape["cells"] if c["phase"] == phase], colors)
            axis.set_title(f"{phase}: {describe_query(shape)}", fontsize=7)
    axes[0][0].legend()
    figure.suptitle(f"microseconds a layer, {result['device_name']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_panel(axis: Any, cells: list[Mapping[str, Any]], colors: Mapping[str, str]) -> None:
    for name, color in colors.items():
        places = [i for i, cell in enumerate(cells) if name in cell["kernels"]]
        times = [cells[i]["kernels"][name]["median_us"] for i in places]
        axis.plot(places, times, "o--", color=color, label=name)
    labels = [f"{cell['batch_size']} x {cell['length']}" for cell in cells]
    axis.set_xticks(range(len(cells)), labels, fontsize=7, rotation=30 if len(cells) > 4 else 0)
    axis.set_xlabel("rows x tokens")
    axis.set_yscale("log")
    axis.grid(alpha=0.3, which="both")
