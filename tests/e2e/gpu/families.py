"""One tiny checkpoint of every family, as directories that an engine loads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.hybrid.models.families import HYBRID_WRITERS
from tests.models.families import FAMILIES, make_reference


def _write_reference(name: str, directory: Path) -> None:
    make_reference(name).save_pretrained(directory)


_WRITERS: dict[str, Callable[[Path], object]] = {
    **{name: partial(_write_reference, name) for name in FAMILIES},
    **HYBRID_WRITERS,
}
NAMES = tuple(_WRITERS)


def write_checkpoint(name: str, root: Path) -> Path:
    """Write the checkpoint of a family and return its directory."""
    directory = root / name
    if not directory.exists():
        _WRITERS[name](directory)
    return directory
