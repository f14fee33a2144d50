"""Draws the results of the GPU benchmarks as PNG files beside their JSON.

    python benchmarks/draw.py            # everything that has results

`h200_offline.png`: speed beside the peer's, a bar for each work. `h200_profile.png`: where a decode
step's time goes, a stacked bar for each work of few rows (with many, prompts mix with steps).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

RESULTS = Path(__file__).resolve().parent / "results"
KINDS = {
    "products": ("skinny", "nvjet", "gemm", "splitKreduce", "cutlass", "dot_kernel"),
    "mixtures": ("_grouped", "_single", "_count", "_place", "_sum_kernel", "route", "add_gated"),
    "attention": ("_decode", "_prefill", "sdpa", "latent"),
    "states": ("_delta", "_mamba", "_conv", "_gated_norm"),
    "norms, activations, cache writes": ("norm", "activation", "rope", "cache", "relu2"),
}
OTHER = "everything else"
FEW_ROWS = 8
TOP = 1.4  # of the axis of ratios


def draw_ratios(result: dict[str, Any], path: Path) -> None:
    """Draw how many times the peer's speed each work reached."""
    kinds = {"rows": "", "rows_with_16_bit_states": ", 16-bit states"}
    kinds["rows_with_tied_experts"] = ", tied experts"
    named = [
        (f"{r['model']}{note}  {r['batch']} x ({r['input']} + {r['output']})", r["times_peer"])
        for kind, note in kinds.items()
        for r in (result[kind] if kind == "rows" else result[kind]["rows"])
        if r["times_peer"]
    ]
    names, ratios = [name for name, _ in named], [ratio for _, ratio in named]
    figure, axes = plt.subplots(figsize=(8, 0.3 * len(named) + 1), layout="constrained")
    bars = axes.barh(names, ratios, color=["C2" if r >= 1 else "C1" for r in ratios])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlim(0, max(TOP, *(1.1 * r for r in ratios)))
    axes.invert_yaxis()
    axes.set_xlabel("times the peer's speed, one H200, bfloat16")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def sort_kernels(kernels: list[dict[str, Any]]) -> Counter[str]:
    """Return microseconds by kind."""
    times: Counter[str] = Counter()
    for row in kernels:
        name = row["kernel"]
        kind = next((k for k, parts in KINDS.items() if any(p in name for p in parts)), OTHER)
        times[kind] += row["total_us"]
    return times


def draw_steps(works: list[dict[str, Any]], path: Path) -> None:
    """Draw a decode step of each work: kernels by kind, and the time without any."""
    steps = []
    for work in works:
        if int(work["work"].split(":")[2]) > FEW_ROWS:
            continue
        count = int(work["work"].split(":")[1]) - 1
        rest = sort_kernels(work["all"]["kernels"])
        rest.subtract(sort_kernels(work["prompts"]["kernels"]))
        times = {kind: us / count / 1e3 for kind, us in rest.items()}
        span_ms = (work["all"]["span_us"] - work["prompts"]["span_us"]) / count / 1e3
        times["no kernel"] = max(0.0, span_ms - sum(times.values()))
        steps.append((f"{work['shape']}  {work['work']}", times))
    figure, axes = plt.subplots(figsize=(9, 0.35 * len(steps) + 1.6), layout="constrained")
    names, left = [name for name, _ in steps], [0.0] * len(steps)
    for kind in (*KINDS, OTHER, "no kernel"):
        widths = [max(0.0, times.get(kind, 0.0)) for _, times in steps]
        axes.barh(names, widths, left=left, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms of a step with one new token a row")
    axes.legend(fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.25))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Draw what has results."""
    offline, profile = RESULTS / "h200_offline.json", RESULTS / "h200_profile.json"
    if offline.is_file():
        draw_ratios(json.loads(offline.read_text()), offline.with_suffix(".png"))
    works = json.loads(profile.read_text())["works"] if profile.is_file() else []
    if works and "prompts" in works[0]:
        draw_steps(works, profile.with_suffix(".png"))


if __name__ == "__main__":
    main()
