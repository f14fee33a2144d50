"""The callers that modules name are there, of which the base has not all."""

from __future__ import annotations

from tests.architecture.test_callers import CASES, MODULES, find_module


def test_every_caller_that_is_named_is_there() -> None:
    missing = [(place, name) for place, name in CASES if find_module(name, MODULES[place]) is None]
    assert not missing
