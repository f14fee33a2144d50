"""Environment variables: numbers that are none are said by name."""

from __future__ import annotations

import pytest

from vllm import envs
from vllm.errors import ConfigError


@pytest.mark.parametrize("name", ["VLLM_CPU_KVCACHE_SPACE", "VLLM_RPC_TIMEOUT"])
@pytest.mark.parametrize("text", ["x", "-1", "nan", "inf"])
def test_numbers_that_are_none(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name} must be a number, 0 or more, got '{text}'"):
        getattr(envs, name)


def test_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    assert envs.VLLM_CPU_KVCACHE_SPACE == 0.5
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "")
    assert envs.VLLM_CPU_KVCACHE_SPACE == 0
