"""The source tree as tests of packaging and architecture see it: its place, copies, builds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NOT_SOURCES = (
    ".git", ".venv", ".models", ".peers", "build", "dist", "*.egg-info", "__pycache__", "*.so",
    ".*_cache", ".hypothesis",
)  # fmt: skip


def copy_sources(target: Path) -> None:
    """Copy the tree as somebody without git and without build products would have it."""
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*_NOT_SOURCES), symlinks=True)


def run_build(tree: Path, call: str, device: str = "empty") -> None:
    """Call one hook of the build backend in `tree`, as pip does.

    Args:
        tree: an unpacked source tree.
        call: the hook with its arguments, e.g. "build_wheel('/some/folder')".
        device: VLLM_TARGET_DEVICE; "empty" compiles nothing.
    """
    command = [sys.executable, "-c", f"from setuptools import build_meta; build_meta.{call}"]
    scripts = str(Path(sys.executable).parent)
    environment = os.environ | {
        "VLLM_TARGET_DEVICE": device,
        "PATH": scripts + os.pathsep + os.environ.get("PATH", ""),
    }
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
