"""One tiny checkpoint of every family, as directories that an engine loads."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.hybrid.models.families import HYBRID_WRITERS
from tests.models.families import FAMILIES, make_reference


def _write_reference(name: str, directory: Path) -> None:
    make_reference(name).save_pretrained(directory)


_WRITERS: dict[str, Callable[[Path], object]] = {
    **{name: partial(_write_reference, name) for name in FAMILIES},
    **HYBRID_WRITERS,
}
NAMES = tuple(_WRITERS)
_ROUTER = re.compile(r"(\.gate|router|router\.layer)\.weight$")


def write_checkpoint(name: str, root: Path) -> Path:
    """Write the checkpoint of a family and return its directory."""
    directory = root / name
    if not directory.exists():
        _WRITERS[name](directory)
        _spread_routers(directory / "model.safetensors")
    return directory


def _spread_routers(file: Path) -> None:
    """Set the experts of a mixture further apart.

    Random routers give all experts about the same weight, so that rounding, which now and then
    swaps the last expert chosen for the next, changes a good part of the output.
    """
    weights = load_file(file)
    routers = {name: 4 * weight for name, weight in weights.items() if _ROUTER.search(name)}
    if routers:
        save_file(weights | routers, file, metadata={"format": "pt"})
