"""Forms that are not measured are off, and a name that is none is told."""

from __future__ import annotations

import pytest

from vllm.errors import ConfigError
from vllm.utils.tried_forms import TRIED_FORMS, is_tried, list_tried_forms


def test_all_are_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TRIED_FORMS", raising=False)
    assert not any(map(is_tried, TRIED_FORMS))
    monkeypatch.setenv("VLLM_TRIED_FORMS", " join, cudnn")
    assert list_tried_forms() == {"join", "cudnn"}
    assert is_tried("join")
    assert not is_tried("expand")


def test_what_is_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TRIED_FORMS", "join,cuddn")
    with pytest.raises(ConfigError, match="names cuddn; allowed, by commas: copies, cudnn"):
        list_tried_forms()
