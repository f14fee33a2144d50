"""Compiled ops: only `_custom_ops` touches torch.ops; every door has a naive twin of its form."""

from __future__ import annotations

import ast
import importlib
import inspect
from types import ModuleType

import pytest

from tests.architecture.python_source import PACKAGE, list_modules

NO_DOORS = ("__init__", "library", "peer")  # the memory of other processes has no twin
FAMILIES = sorted(p.stem for p in (PACKAGE / "_custom_ops").glob("*.py") if p.stem not in NO_DOORS)
TWINS = sorted(p.stem for p in (PACKAGE / "_custom_ops" / "naive").glob("*.py"))

TWINLESS: dict[str, str] = {}
"""Public functions of doors that compute nothing a twin could show, with the reason."""


def public_functions(module: ModuleType) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(value)
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_doors_have_twins_of_the_same_form(family: str) -> None:
    assert family in TWINS
    doors = public_functions(importlib.import_module(f"vllm._custom_ops.{family}"))
    twins = public_functions(importlib.import_module(f"vllm._custom_ops.naive.{family}"))
    assert doors
    for name, signature in doors.items():
        if f"{family}.{name}" in TWINLESS:
            continue
        assert name in twins, f"{family}.{name} has no naive twin"
        assert signature == twins[name], f"{family}.{name}: {signature} but {twins[name]}"


def test_every_twin_has_a_door() -> None:
    assert set(TWINS) - {"__init__"} == set(FAMILIES)


def test_only_the_doors_touch_torch_ops() -> None:
    users = set()
    for module in list_modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops":
                users.add(module.place)
    assert all(place.startswith("vllm/_custom_ops/") for place in users), users
