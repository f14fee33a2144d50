"""One noun a file: files of at most 400 lines, functions of at most 60, kernels of at most 150.

A docstring does not count towards its function. An exception is a line below with its reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.python_source import list_functions, list_modules
from tests.utils.source_tree import ROOT

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150

LARGE_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}

CPP = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh"))
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))
TOOL_FILES = sorted(p for f in ("tools", "benchmarks") for p in (ROOT / f).rglob("*.py"))


def test_files() -> None:
    large = {}
    for path in [*(m.path for m in list_modules()), *CPP, *TEST_FILES, *TOOL_FILES]:
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            large[str(path.relative_to(ROOT))] = lines
    assert large.keys() == LARGE_FILES.keys(), large


def count_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton compiles a function."""
    decorators = map(ast.unparse, function.decorator_list)
    return any(name in text for text in decorators for name in ("triton.jit", "gluon.jit"))


def test_functions() -> None:
    long = {}
    for module in list_modules():
        for name, function in list_functions(module.tree):
            lines = count_lines(function)
            if lines > (MAX_KERNEL_LINES if is_kernel(function) else MAX_FUNCTION_LINES):
                long[f"{module.place}:{name}"] = lines
    assert long.keys() == LONG_FUNCTIONS.keys(), long


def list_cpp_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the first line and the length of every function at namespace depth.

    In house form its head starts in the first column and its body ends with a brace there.
    """
    lines = path.read_text().splitlines()
    for i, line in enumerate(lines):
        if not re.search(r"\)( const)?( noexcept)?( \{|$)", line) or line.startswith(
            (" ", "#", "}")
        ):
            continue
        end = next((j for j in range(i + 1, len(lines)) if lines[j] in ("}", "};")), None)
        if end is not None:
            yield line, end - i + 1


@pytest.mark.parametrize("path", CPP, ids=lambda p: p.name)
def test_kernels(path: Path) -> None:
    long = [(head, size) for head, size in list_cpp_functions(path) if size > MAX_KERNEL_LINES]
    assert not long
