"""Runs the tests that need a GPU and keeps what came out, since CI has none.

    python benchmarks/gpu_tests.py --output-json benchmarks/results/h200_tests.json

Writes how many tests of each file passed, failed and were skipped, the names of those that failed,
machine, versions and command. Needs pytest-xdist.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe_machine, describe_versions  # noqa: E402

GPU_TESTS = (
    "tests/_custom_ops/gpu",
    "tests/_custom_ops/triton",
    "tests/distributed/gpu",
    "tests/model_executor/layers/gpu",
    "tests/model_executor/layers/test_rotary_embedding.py",
    "tests/e2e/gpu",
    "tests/hybrid/test_cuts_gpu.py",
    "tests/hybrid/test_state_dtype_gpu.py",
    "tests/hybrid/test_two_gpus.py",
    "tests/worker/test_prompt_logprobs.py",
)


def read_outcomes(report: Path) -> tuple[dict[str, Counter[str]], list[str]]:
    """Return the outcomes of each test module, and the names of the tests that failed."""
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        name = f"{case.get('classname')}::{case.get('name')}"
        if kinds & {"failure", "error"}:
            outcome = "failed"
            failed.append(name)
        else:
            outcome = "skipped" if "skipped" in kinds else "passed"
        outcomes[str(case.get("classname"))][outcome] += 1
    return outcomes, failed


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    present = [test for test in GPU_TESTS if (ROOT / test).exists()]  # the base lacks the fork's
    parser.add_argument("tests", nargs="*", default=present)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--timeout", type=int, default=120, help="seconds of one test")
    parser.add_argument("--output-json", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=short"]
        command += ["-o", "addopts=--import-mode=importlib", "--timeout", str(args.timeout)]
        command += ["-n", str(args.workers), f"--junitxml={report}", *args.tests]
        started_s = time.perf_counter()
        returned = subprocess.run(command, cwd=ROOT, check=False).returncode
        outcomes, failed = read_outcomes(report)
    total = sum(outcomes.values(), Counter())
    result = {
        "what": "tests that need a GPU",
        "command": " ".join(["python", "benchmarks/gpu_tests.py", *sys.argv[1:]]),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - started_s, 1),
        "total": dict(total),
        "failed": failed,
        "modules": {name: dict(counts) for name, counts in sorted(outcomes.items())},
    }
    args.output_json.write_text(json.dumps(result, indent=1) + "\n")
    return returned


if __name__ == "__main__":
    sys.exit(main())
