"""The series of this tree: it verifies, and the base under it is complete and serves a model."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.utils.source_tree import ROOT
from tests.utils.tiny_models import TinyModels
from tools.pq import verbs
from tools.pq.series import load_series

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="a tree without git has no base to compare with"
)

FOLDERS = (ROOT / "vllm", ROOT / "tests", ROOT / "benchmarks", ROOT / "tools")
IMPORT_ALL = """
import importlib, pkgutil, sys, vllm
assert vllm.__file__.startswith(sys.argv[1]), vllm.__file__
for module in pkgutil.walk_packages(vllm.__path__, "vllm."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:  # an optional library may be absent, a file of the base may not
        if (error.name or "").partition(".")[0] in ("", "vllm"):
            raise
"""
GENERATE = """
import sys, vllm
assert vllm.__file__.startswith(sys.argv[1]), vllm.__file__
llm = vllm.LLM(sys.argv[2], dtype="float32", num_gpu_blocks_override=8, max_model_len=64)
greedy = vllm.SamplingParams(temperature=0, max_tokens=5)
print("".join(o.outputs[0].text for o in llm.generate(["A"], greedy, use_tqdm=False)))
llm.llm_engine.shutdown()
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base tree, without compiled ops."""
    folder = tmp_path_factory.mktemp("base")
    assert verbs.checkout_base(ROOT, folder) == 0
    return folder


def run_in(base: Path, code: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, str(base), *args],
        cwd=base,
        env=os.environ | {"PYTHONPATH": str(base)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def list_owned_modules() -> set[str]:
    owned = load_series(ROOT).base.owns
    places = [str(path.relative_to(ROOT)) for folder in FOLDERS for path in folder.rglob("*.py")]
    names = {place[:-3].replace("/", ".") for place in places if owned(place)}
    return names | {name.removesuffix(".__init__") for name in names}


def list_named_modules(tree: ast.AST) -> Iterator[str]:
    """Yield what a file imports, and the modules that its tables name (`stem` or `stem:Class`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]


def test_series_verifies(capsys: pytest.CaptureFixture[str]) -> None:
    status = verbs.verify(ROOT)
    assert status == 0, capsys.readouterr().out + "run: python -m tools.pq refresh --base"


def test_base_names_no_owned_module(base: Path) -> None:
    owned = list_owned_modules()
    found = []
    for path in sorted(base.rglob("*.py")):
        here = ".".join(path.relative_to(base).parent.parts)
        for name in list_named_modules(ast.parse(path.read_text())):
            is_row = "." in here and f"{here}.{name}" in owned
            if name in owned or is_row:
                found.append(f"{path.relative_to(base)}: {name}")
    assert not found


def test_base_imports_without_owned_files(base: Path) -> None:
    run_in(base, IMPORT_ALL)


def test_base_serves_a_uniform_model(base: Path, tiny_models: TinyModels) -> None:
    for library in (ROOT / "vllm").glob("_C_*.so"):
        shutil.copy(library, base / "vllm")
    assert run_in(base, GENERATE, str(tiny_models.loop())).splitlines()[-1] == "AAAAA"
