"""The floors of the house, no circles, and which imports bring torch in."""

from __future__ import annotations

import subprocess
import sys

import grimp
import pytest

from tests.utils.source_tree import ROOT

TORCH_FREE = (
    "vllm",
    "vllm.scripts",
    "vllm.envs",
    "vllm.config",
    "vllm.sequence",
    "vllm.step",
    "vllm.sampling_params",
    "vllm.outputs",
    "vllm.core.scheduler",
    "vllm.core.cache_manager",
    "vllm.core.capacity",
    "vllm.engine.messages",
    "vllm.engine.client",
    "vllm.engine.async_llm_engine",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.launcher",
)


NOT_IMPORTED = {
    ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.serve"): "only under `python -m`",
}
"""Imports that the graph shows but that importing the module never runs, with reasons."""


@pytest.mark.parametrize("module", TORCH_FREE)
def test_import_brings_no_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit(int('torch' in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr or f"importing {module} imports torch"


def test_floors() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports; "
               "import sys; sys.exit(lint_imports(no_cache=True))"]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def find_circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected parts of more than one node (Tarjan, 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[set[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(arrows[node]):
            if other not in order:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == order[node]:
            part = set()
            while node not in part:
                part.add(stack.pop())
            if len(part) > 1:
                circles.append(part)

    for node in sorted(arrows):
        if node not in order:
            visit(node)
    return circles


def test_no_circle_of_files() -> None:
    graph = grimp.build_graph("vllm", exclude_type_checking_imports=True, cache_dir=None)
    arrows = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    for importer, imported in NOT_IMPORTED:
        arrows[importer].discard(imported)
    assert find_circles(arrows) == []


def test_find_circles_finds_them() -> None:
    assert find_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [{"b", "c"}]
