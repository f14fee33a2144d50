"""Padding changes no step: rows of padding and spare tokens are no one's neighbours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("padded_steps.py")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="acts as if there was a GPU")
@pytest.mark.parametrize("family", ["deepseek_v2", "nemotron_h_experts", "qwen3_next_experts"])
def test_padded_steps_equal_others(family: str) -> None:
    pytest.importorskip("triton")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "TRITON_INTERPRET": "1",
    }
    process = subprocess.run(
        [sys.executable, str(SCRIPT), family],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    gap = json.loads(process.stdout.splitlines()[-1])[family]
    assert gap < 1e-4
