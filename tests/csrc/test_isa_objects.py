"""What the object files of the kernels may export.

A kernel is compiled once for each instruction set. A function that is shared by name between those
objects and the baseline ones could be taken from the wide object by the linker, and an older
processor would die of it. The test reads the objects of the last build, where there are any.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ISAS = ("avx2", "avx512", "avx512_bf16")
HARMLESS = ("DW.ref.__gxx_personality_v0",)  # an address, no code


def list_objects(isa: str) -> list[Path]:
    """Return the kernel objects of one instruction set in any build folder."""
    return sorted(ROOT.glob(f"build/**/cpu_kernels_{isa}.dir/**/*.o"))


@pytest.mark.parametrize("isa", ISAS)
def test_kernels_share_no_symbol_with_other_objects(isa: str) -> None:
    objects = list_objects(isa)
    if not objects:
        pytest.skip("no object files under build/: the ops were not built in this tree")
    if shutil.which("nm") is None:
        pytest.skip("binutils are not installed")
    shared = []
    for path in objects:
        names = subprocess.run(
            ["nm", "-C", "--defined-only", str(path)], capture_output=True, text=True, check=True
        ).stdout
        for line in names.splitlines():
            _, kind, name = line.split(" ", 2)
            if kind in "WVu" and f"vllm::cpu::{isa}::" not in name and name not in HARMLESS:
                shared.append(f"{path.name}: {name}")
    assert shared == []
