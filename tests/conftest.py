"""Fixtures that tests of several folders share. Anything longer lives in `tests/utils/`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.utils.real_models import require_gemma3, require_smollm2


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, from its PyPI package."""
    return require_smollm2()


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """The GGUF file of Gemma 3 270M, joined from its PyPI packages."""
    return require_gemma3()
