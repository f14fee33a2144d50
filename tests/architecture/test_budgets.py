"""Budgets: fields of a config, environment variables and who reads them.

A field or a variable more needs an owner and a unit, and a review that raises the number here.
"""

from __future__ import annotations

import ast
import dataclasses

import pytest

import vllm.config
from tests.architecture.python_source import list_modules
from vllm import envs

MAX_CONFIG_FIELDS = 15
MAX_ENVIRONMENT_VARIABLES = 20

CONFIGS = [
    value
    for value in vars(vllm.config).values()
    if isinstance(value, type) and dataclasses.is_dataclass(value)
]

READS = ("os.environ", "os.getenv", "os.putenv")
ENVIRONMENT_READERS = {
    "vllm/envs.py": "the one place",
    "vllm/_custom_ops/triton/tensor_cores.py": "a switch of Triton's compiler has no other form",
}
"""Files that touch os.environ, with the reason."""


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__name__)
def test_config_fields(config: type) -> None:
    assert len(dataclasses.fields(config)) <= MAX_CONFIG_FIELDS


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__name__)
def test_configs_are_frozen_and_slotted(config: type) -> None:
    assert config.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "__slots__" in vars(config)


def test_number_of_environment_variables() -> None:
    assert len(dir(envs)) <= MAX_ENVIRONMENT_VARIABLES


def test_only_envs_reads_the_environment() -> None:
    readers = set()
    for module in list_modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in READS:
                readers.add(module.place)
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                assert not {alias.name for alias in node.names} & {"environ", "getenv", "putenv"}
    assert readers == ENVIRONMENT_READERS.keys()


def test_every_environment_variable_is_read() -> None:
    read = {
        node.attr
        for module in list_modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "envs"
    }
    assert set(dir(envs)) <= read
