"""Tiny models compute on one thread, and every test may hear a warning that is given once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vllm import logger


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "_said", set())
