"""Real servers, one for each configuration, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.utils.server_process import ServerProcess

API_KEY = "secret-key"
MIDDLEWARE = "tests.utils.do_nothing_middleware.do_nothing"


@pytest.fixture(scope="package")
def server(chain_model: Path) -> Iterator[ServerProcess]:
    """A server as most people start it: engine in a process of its own, nothing extra."""
    with ServerProcess(chain_model, "--max-log-len", "20", "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="package")
def guarded(chain_model: Path) -> Iterator[ServerProcess]:
    """A server with an API key, a user's middleware, tools, and the engine in its own process."""
    with ServerProcess(
        chain_model,
        "--middleware",
        MIDDLEWARE,
        "--enable-auto-tool-choice",
        "--tool-call-parser=hermes",
        "--disable-frontend-multiprocessing",
        "--root-path",
        "/proxy",
        "--allowed-origins",
        '["https://good.example"]',
        "--disable-fastapi-docs",
        api_key=API_KEY,
    ) as running:
        yield running
