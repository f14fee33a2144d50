"""Documents name files that exist, and modules say what lives in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.architecture.python_source import list_modules
from tests.utils.source_tree import ROOT

DOCUMENTS = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
NAMED_FILE = re.compile(r"`((?:vllm|csrc|tests|tools|benchmarks|patches|docs)/[\w/.-]+\.\w+)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_named_files_exist(document: Path) -> None:
    missing = [
        name for name in NAMED_FILE.findall(document.read_text()) if not (ROOT / name).exists()
    ]
    assert not missing


def test_one_step_names_its_files() -> None:
    text = (ROOT / "docs" / "one_step.md").read_text()
    assert len(set(NAMED_FILE.findall(text))) >= 8


def test_every_module_has_a_docstring() -> None:
    silent = [
        module.place
        for module in list_modules()
        if module.tree.body and ast.get_docstring(module.tree) is None
    ]
    assert not silent


def test_no_leftovers_in_comments() -> None:
    pattern = re.compile(r"#\s*(TODO|FIXME|XXX|HACK)\b")
    assert not [m.place for m in list_modules() if pattern.search(m.text)]
