"""What serving costs beside the bare engine, on one machine: start, memory, time per token.

Loads the model twice, offline and behind HTTP, and lets them take turns on the same number of
streams. Reports the time per output token of both and their ratio, the client's own CPU time, how
long the server takes until its first answer, and the memory of all server processes (proportional
share) while loading and steady, without the KV cache. Writes JSON into benchmarks/results/.

    python benchmarks/serving/http_overhead.py --streams 16
    python benchmarks/serving/http_overhead.py --streams 64 --shape qwen2-7b      # on a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.engine.compare_cpu import ApiEngine  # noqa: E402
from benchmarks.engine.prepare_peers import prepare  # noqa: E402
from benchmarks.engine.probe import make_prompts  # noqa: E402
from benchmarks.engine.shapes import SHAPES, write_shape, write_tokenizer  # noqa: E402
from benchmarks.machine import describe_machine, describe_versions  # noqa: E402
from benchmarks.serving.raw_client import RawClient  # noqa: E402
from benchmarks.serving.soak import measure_pss_mib, start_server  # noqa: E402

GPU_SHARE = 0.4  # of the card, for each of the two engines
CACHE_GIB = 0.5  # enough for the streams; its touched pages are taken off the memory reported
VOCAB = 49152


class MemoryWatch(threading.Thread):
    """Samples the memory of a process tree until stopped."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._done = threading.Event()
        self.peak_mib = 0.0

    def run(self) -> None:
        """Keep the largest sample."""
        while not self._done.wait(0.05):
            self.peak_mib = max(self.peak_mib, measure_pss_mib(self._pid))

    def stop(self) -> float:
        """End the sampling and return the peak."""
        self._done.set()
        self.join()
        return self.peak_mib


async def wait_answer(port: int, process: subprocess.Popen[bytes]) -> str:
    """Wait for the first answer and return the name of the served model."""
    client = RawClient(port, "")
    while process.poll() is None:
        try:
            models = await client.get("/v1/models")
            name = models["data"][0]["id"]
            body = {"prompt": [1, 2, 3], "max_tokens": 1}
            reply = await RawClient(port, name).post("/v1/completions", body)
            if reply.status == 200:
                return str(name)
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass
        await asyncio.sleep(0.05)
    raise SystemExit("the server could not start")


async def stream_all(client: RawClient, prompts: list[list[int]], tokens: int) -> float:
    """Stream every prompt at once; return the seconds until the last is whole."""
    body = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "stream": True}
    start_s = time.perf_counter()
    replies = await asyncio.gather(
        *(client.post("/v1/completions", body | {"prompt": ids}) for ids in prompts)
    )
    if any(not reply.is_whole for reply in replies):
        raise SystemExit(f"a stream broke: {replies[0].error_text}")
    return time.perf_counter() - start_s


def measure_http(port: int, name: str, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Run one round over HTTP, timed as the offline one: all tokens less one token each."""
    client = RawClient(port, name)
    first = make_prompts(args.streams, args.prompt, 2 * seed, args.vocab)
    prefill_s = asyncio.run(stream_all(client, first, 1))
    prompts = make_prompts(args.streams, args.prompt, 2 * seed + 1, args.vocab)
    cpu_s = time.process_time()
    total_s = asyncio.run(stream_all(client, prompts, args.tokens))
    return {
        "tpot_ms": 1e3 * (total_s - prefill_s) / (args.tokens - 1),
        "client_cpu_s": time.process_time() - cpu_s,
        "elapsed_s": total_s,
    }


def measure_offline(engine: ApiEngine, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Run one round in process."""
    row = engine.measure(args.streams, args.prompt, args.tokens, seed)
    return {"tpot_ms": 1e3 * (row["total_s"] - row["prefill_s"]) / (args.tokens - 1)}


def start_http(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Start the server and note what starting took."""
    rows = str(max(32, args.streams))
    flags = ["--max-model-len", "2048", "--max-num-seqs", rows, "--no-enable-prefix-caching"]
    if args.shape:
        share = str(GPU_SHARE)
        flags += ["--load-format", "dummy", "--dtype", "bfloat16"]
        flags += ["--gpu-memory-utilization", share]
    server_args = argparse.Namespace(model=str(model), serve_args=flags)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(CACHE_GIB)
    started_s = time.perf_counter()
    process, port = start_server(server_args)
    watch = MemoryWatch(process.pid)
    watch.start()
    name = asyncio.run(wait_answer(port, process))
    ready_s = time.perf_counter() - started_s
    return {
        "process": process,
        "port": port,
        "name": name,
        "ready_s": round(ready_s, 2),
        "loading_peak_pss_mib": round(watch.stop()),
        "idle_pss_mib": round(measure_pss_mib(process.pid)),
    }


def find_model(args: argparse.Namespace) -> Path:
    """Return the model that both engines load."""
    if not args.shape:
        return Path(args.model or prepare({"ours"}).bf16_gguf)
    model = write_shape(args.shape, Path(tempfile.mkdtemp()))
    write_tokenizer(args.shape, model)
    return model


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything and return the report."""
    model = find_model(args)
    server = start_http(args, model)
    process, port, name = server.pop("process"), server.pop("port"), server.pop("name")
    more: dict[str, Any] = {"max_num_seqs": max(32, args.streams)}
    if args.shape:
        more |= {"load_format": "dummy", "gpu_memory_utilization": GPU_SHARE}
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PROBE_LLM_ARGS": json.dumps(more),
    }
    offline, http = [], []
    with ExitStack() as ends:  # the server ends also where the other engine could not start
        ends.callback(process.wait, 30)
        ends.callback(process.terminate)
        engine = ApiEngine("offline", sys.executable, str(model), args.vocab, env)
        ends.callback(engine.close)
        for seed in range(args.runs + 1):
            rows = measure_offline(engine, args, seed), measure_http(port, name, args, seed)
            if seed:
                offline.append(rows[0])
                http.append(rows[1])
        steady = measure_pss_mib(process.pid)
    ours, bare = (statistics.median(r["tpot_ms"] for r in rows) for rows in (http, offline))
    return {
        "what": f"{args.streams} streams of {args.prompt} + {args.tokens} tokens, medians",
        "machine": describe_machine(),
        "versions": describe_versions(),
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "server": server | {"steady_pss_mib_with_cache": round(steady)},
        "offline_tpot_ms": round(bare, 2),
        "http_tpot_ms": round(ours, 2),
        "http_over_offline": round(ours / bare, 3),
        "client_cpu_share": round(
            statistics.median(r["client_cpu_s"] / r["elapsed_s"] for r in http), 3
        ),
        "rounds": {"offline": offline, "http": http},
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; SmolLM2 BF16 if unset")
    parser.add_argument("--shape", choices=SHAPES, help="made-up weights of a shape, on a GPU")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens")
    parser.add_argument("--runs", type=int, default=5)
    default = ROOT / "benchmarks" / "results" / "http_overhead.json"
    parser.add_argument("--output", type=Path, default=default)
    args = parser.parse_args()
    args.vocab = SHAPES[args.shape]["vocab_size"] if args.shape else VOCAB
    report = run(args)
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "rounds"}, indent=1))


if __name__ == "__main__":
    main()
