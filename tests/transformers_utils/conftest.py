"""Log records reach pytest's `caplog` in this folder."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _propagate_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
