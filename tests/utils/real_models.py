"""Where the two small real models lie, for tests that need one.

`make test` fetches both; a test that asks for one that is absent is skipped with the command that
brings it. The fixtures are in `tests/conftest.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import real_models


def require_smollm2() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct (Q4_1), or skip the test."""
    path = real_models.find_smollm2()
    if path is None:
        pytest.skip(f"{real_models.SMOLLM2_PACKAGE} is not installed; run: make models")
    return path


def require_gemma3() -> Path:
    """Return the GGUF file of Gemma 3 270M (Q4_K_M), or skip the test."""
    path = real_models.find_gemma3()
    if path is None:
        pytest.skip(f"{real_models.GEMMA3_FILE.name} is not in .models; run: make models")
    return path
