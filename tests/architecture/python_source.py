"""Reads the package's own source for the rules of this folder."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.utils.source_tree import ROOT

PACKAGE = ROOT / "vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One file of the package."""

    path: Path
    name: str
    text: str
    tree: ast.Module

    @property
    def place(self) -> str:
        """The path below the root, for messages."""
        return str(self.path.relative_to(ROOT))


@functools.cache
def list_modules() -> tuple[Module, ...]:
    """Return every module of the package."""
    modules = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        modules.append(Module(path=path, name=name, text=text, tree=ast.parse(text)))
    return tuple(modules)


def list_functions(tree: ast.AST) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function with its qualified name, outer ones first."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)

    yield from walk(tree, "")
