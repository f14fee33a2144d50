"""Every kernel compiles for an A100 and an H200, fits their memory, and keeps to its registers.

Those that take most of an A100's memory also fit GPUs with 99 KiB a block.

No GPU is needed: a process of its own plays one (`compile_for.py`), since the kernels of this one
are interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]
MOST_STACK = 320
"""Bytes a thread; a few dozen registers that are spilled around a loop cost little."""

LARGE_CASES = {
    "tests._custom_ops.triton.compile_for": (
        "attention, Gemma 3",
        "products, few, silu",
        "products, wide, silu",
        "products, silu",
        "mixture, prompts",
    ),
    "tests._custom_ops.triton.compile_decode": ("largest heads", "DeepSeek-V2"),
}
"""Module -> those of its cases whose kernels take most shared memory."""


def compile_for(
    arch: int, cache: Path, *more: str, cases: str = "tests._custom_ops.triton.compile_for"
) -> tuple[int, list[dict[str, Any]]]:
    """Run a module that compiles; return its exit status and what it printed."""
    command = [sys.executable, "-m", cases, str(arch), *more]
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def check_fits(status: int, lines: list[dict[str, Any]], num_kernels: int) -> None:
    """Check that all cases compiled, to so many kernels at least, and spill little."""
    assert not [line for line in lines if "error" in line]
    assert status == 0
    assert len({line["kernel"] for line in lines}) >= num_kernels
    assert not [line for line in lines if line["stack"] > MOST_STACK]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_fit(arch: int, tmp_path: Path) -> None:
    check_fits(*compile_for(arch, tmp_path), num_kernels=8)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", LARGE_CASES)
def test_kernels_fit_where_there_is_less(module: str, tmp_path: Path) -> None:
    found = compile_for(86, tmp_path, *LARGE_CASES[module], cases=module)
    check_fits(*found, num_kernels=1)
    assert max(line["shared"] for line in found[1]) > 64 << 10  # what there is is used


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    status, lines = compile_for(80, tmp_path, "attention, Qwen2", "--shared", "16384")
    assert status == 1
    assert lines[-1]["error"].startswith("KernelError: _decode_kernel of vllm")
    assert "(shared memory) for sizes of this model, sm_80 has 16384:" in lines[-1]["error"]
