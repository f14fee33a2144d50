"""No kernel is compiled while requests wait: whatever a step wants is known at the start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("late_kernels.py")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="acts as if there was a GPU")
@pytest.mark.parametrize(
    ("arch", "num_seqs", "families"),
    [
        (90, 64, ("gemma3", "deepseek_v2", "gpt_oss")),
        (80, 64, ("qwen3_next_experts", "nemotron_h_experts", "lfm2_dense")),
        (90, 64, ("qwen3_next_wide", "nemotron_h_wide")),
        (90, 1, ("gemma3", "deepseek_v2", "qwen3_next_dense")),
    ],
)
def test_random_steps_want_no_other_kernels(
    arch: int, num_seqs: int, families: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_INTERPRET": "0",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    }
    process = subprocess.run(
        [sys.executable, str(SCRIPT), str(arch), str(num_seqs), *families],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    late = json.loads(process.stdout.splitlines()[-1])
    assert late == {name: [] for name in families}
