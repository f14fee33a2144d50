"""A full garbage collection does not hold up the streams of a server."""

from __future__ import annotations

import os
from pathlib import Path

from tests.utils.server_process import ServerProcess

# Imported by every process that starts: says how long full collections take around a freeze.
SITE = """
import gc, os, time

def collect():
    start_s = time.perf_counter()
    gc.collect()
    return time.perf_counter() - start_s

def note(freeze=gc.freeze):
    before_s = collect()
    freeze()
    after_s = min(collect() for _ in range(3))
    with open(os.path.join(os.environ["HEAP_REPORTS"], str(os.getpid())), "w") as report:
        report.write(f"{before_s} {after_s}")

gc.freeze = note
"""


def test_what_a_server_has_loaded_is_not_looked_at_again(chain_model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    reports = tmp_path / "reports"
    reports.mkdir()
    root = str(Path(__file__).parents[3])
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), root]), "HEAP_REPORTS": str(reports)}
    with ServerProcess(chain_model, "--tensor-parallel-size", "2", env=env) as server:
        served = {str(server.process.pid), *(str(child.pid) for child in server.children())}
        reply = server.http.post("/v1/completions", json={"model": "model", "prompt": "A"})
        assert reply.status_code == 200, reply.text
    times = {path.name: [float(t) for t in path.read_text().split()] for path in reports.iterdir()}
    assert len(times) == 4, "the server, its engine and two ranks"
    assert set(times) <= served
    for before_s, after_s in times.values():
        assert after_s < before_s / 5, times
