"""The small fork that the tests of the patch queue work on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patches.small_fork import build_fork


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """A base of three files, two hooks, one owned file, and the series that says so."""
    return build_fork(tmp_path / "fork")
