"""The soak benchmark, for some seconds on a tiny model, so that it works when it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.utils.server_process import ServerProcess

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "serving" / "soak.py"


def test_soak(server: ServerProcess, tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    command = [
        sys.executable, str(SCRIPT), "--port", str(server.port), "--pid", str(server.process.pid),
        "--minutes", "0.12", "--streams", "6", "--output", str(output),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert output.exists(), done.stderr
    result = json.loads(output.read_text())
    assert result["faults"] == []
    assert result["checks"]["every block is free at the end"]
    assert result["num_requests"] > 5
    assert result["ttft_p99_ms"] >= result["ttft_median_ms"] > 0
