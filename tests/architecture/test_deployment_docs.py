"""The environment variables that are documented are those that are read."""

from __future__ import annotations

import re

from tests.utils.source_tree import ROOT
from vllm import envs

TEXT = (ROOT / "docs" / "deployment.md").read_text()


def test_every_environment_variable_is_documented() -> None:
    documented = set(re.findall(r"`((?:VLLM|OPENAI)_[A-Z_]+)`", TEXT))
    assert documented == set(dir(envs))
