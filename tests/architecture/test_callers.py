"""Who a module says it is called by does import it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.python_source import Module, list_modules

MODULES = {module.place: module for module in list_modules()}
_FILE = r"`[\w/{},]+\.py`"
_CALLERS = re.compile(rf"(?:Asked|Built|Called|Made|Used) by ({_FILE}(?:(?:,| and) {_FILE})*)")


def list_named(module: Module) -> Iterator[str]:
    """Yield the files that a module's first words name as its callers."""
    text = re.sub(r"\s+", " ", ast.get_docstring(module.tree) or "")
    found = _CALLERS.search(text)
    for name in re.findall(r"`(.+?)`", found[1]) if found else ():
        head, brace, rest = name.partition("{")
        inner, _, tail = rest.partition("}")
        yield from (head + part + tail for part in (inner.split(",") if brace else ("",)))


def find_module(name: str, user: Module) -> Module | None:
    """Return the module that a docstring names: beside it, in the package, or the only one."""
    folder = user.place.rpartition("/")[0]
    for place in (f"{folder}/{name}", f"vllm/{name}", name):
        if place in MODULES:
            return MODULES[place]
    found = [place for place in MODULES if place.endswith(f"/{name}")]
    return MODULES[found[0]] if len(found) == 1 else None


def list_imports(module: Module) -> Iterator[str]:
    """Yield the modules, and names in them, that a module imports, also late ones by their text."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


CASES = [(module.place, name) for module in list_modules() for name in list_named(module)]


@pytest.mark.parametrize(("place", "name"), CASES)
def test_a_caller_that_is_named_imports_the_module(place: str, name: str) -> None:
    module = MODULES[place]
    caller = find_module(name, module)
    if caller is None:
        pytest.skip(f"{name} is not in this tree")
    package, _, stem = module.name.rpartition(".")
    wanted = {module.name, stem}  # a table of modules has the stem
    face = MODULES.get(f"{package.replace('.', '/')}/__init__.py")
    if face is not None and module.name in list_imports(face):
        wanted.add(package)
    assert wanted & set(list_imports(caller)), f"{caller.place} does not import {place}"
