"""Decode attention compiles for an A100 and an H200 with every tile and fits them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests._custom_ops.triton.test_compile import check_fits, compile_for


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_fit(arch: int, tmp_path: Path) -> None:
    found = compile_for(arch, tmp_path, cases="tests._custom_ops.triton.compile_decode")
    check_fits(*found, num_kernels=1)
