"""A missing or broken compiled extension (case C41).

What needs no op works; the server says what is wrong within seconds, with both torch versions;
nothing falls back to slow code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.utils.fixtures_models import build_chain, build_chain_tokenizer, save_checkpoint
from tests.utils.source_tree import ROOT

OTHER_TORCH = "2.4.0"
LIBRARY = "_C_cpu.abi3.so"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the path that holds the package without compiled ops."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(
        ROOT / "vllm", site / "vllm", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    return site


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(build_chain(), tmp_path_factory.mktemp("model"), build_chain_tokenizer())


def break_library(site: Path, how: str) -> None:
    library = site / "vllm" / LIBRARY
    library.unlink(missing_ok=True)
    if how == "empty":
        library.touch()
    if how == "truncated":
        whole = (ROOT / "vllm" / LIBRARY).read_bytes()
        library.write_bytes(whole[: len(whole) // 2])
    if how == "undefined symbol":
        source = site / "broken.c"
        source.write_text(
            "extern void a_symbol_of_another_torch(void);\n"
            f'const char vllm_build_info[] = "VLLM_BUILT_FOR_TORCH={OTHER_TORCH};";\n'
            "__attribute__((constructor)) void start(void) { a_symbol_of_another_torch(); }\n"
        )
        subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True, timeout=60)


def run_vllm(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm.scripts", *arguments],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=site,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "undefined symbol"])
def test_server_start_says_what_is_wrong(package: Path, checkpoint: Path, how: str) -> None:
    break_library(package, how)
    started_s = time.monotonic()
    done = run_vllm(package, "serve", str(checkpoint), "--port", "0")
    took_s = time.monotonic() - started_s
    assert done.returncode != 0
    assert took_s < 20
    assert LIBRARY in done.stderr
    assert "make build" in done.stderr
    for hidden in ("NameError", "AttributeError"):
        assert hidden not in done.stderr
    if how == "missing":
        assert "are missing" in done.stderr
    else:
        assert torch.__version__ in done.stderr
    if how == "truncated":
        assert "it is truncated" in done.stderr
    if how == "undefined symbol":
        assert f"built with torch {OTHER_TORCH}" in done.stderr
        assert "a_symbol_of_another_torch" in done.stderr


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), ("serve", "--help"), ("bench", "--help")]
)
def test_what_needs_no_op_works(package: Path, arguments: tuple[str, ...]) -> None:
    break_library(package, "empty")
    done = run_vllm(package, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_configs_can_be_read(package: Path, checkpoint: Path) -> None:
    break_library(package, "empty")
    code = (
        "from vllm.engine.arg_utils import EngineArgs; "
        f"print(EngineArgs(model={str(checkpoint)!r}).create_engine_config()"
        ".model_config.architectures[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(package)},
        cwd=package,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "LlamaForCausalLM", done.stderr
