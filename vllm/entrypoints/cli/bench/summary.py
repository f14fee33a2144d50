"""Percentiles, means and result files of measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def find_percentiles(values: Sequence[float], ranks: Sequence[float]) -> dict[float, float]:
    """Return rank -> percentile, linear between neighbours; 0 where there are no values."""
    if not values:
        return dict.fromkeys(ranks, 0.0)
    return dict(zip(ranks, map(float, np.percentile(values, ranks)), strict=True))


def describe_times(name: str, seconds: Sequence[float], ranks: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles, in milliseconds.

    Keys are 0.6.3's: mean_NAME_ms, median_NAME_ms, std_NAME_ms, pR_NAME_ms.
    """
    times_ms = 1000 * np.asarray(seconds if len(seconds) else [0.0])
    result = {
        f"mean_{name}_ms": float(times_ms.mean()),
        f"median_{name}_ms": float(np.median(times_ms)),
        f"std_{name}_ms": float(times_ms.std()),
    }
    for rank, value in find_percentiles(times_ms.tolist(), ranks).items():
        result[f"p{rank:g}_{name}_ms"] = value
    return result


def write_json(path: str | Path, result: Mapping[str, Any]) -> None:
    """Write a result file, making its folder."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=4) + "\n")
