"""Many streams for minutes, with clients that misbehave: does the server stay right, and small?

Every client picks at random: streams and whole answers, some of which it drops half way, prompts
that are too long, bodies that are no JSON, fields out of range. At the end: no answer that should
not have been, no growth of memory, every cache block free. Writes JSON into benchmarks/results/;
exits with 1 if a check fails.

    python benchmarks/serving/soak.py --minutes 3              # serves SmolLM2 itself
    python benchmarks/serving/soak.py --port 8000 --pid PID    # a server that runs already
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe_machine, describe_versions  # noqa: E402
from benchmarks.serving.raw_client import RawClient, Reply  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
SAMPLE_S = 2.0
MAX_GROWTH_MIB = 20.0
WINDOW_S = 120.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = ("the", "a", "red", "old", "small", "river", "house", "walks", "under", "over", "light")


@dataclass(slots=True)
class Tally:
    """What has happened so far."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    pss_mib: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One kind of request.

    Attributes:
        weight: how often it is chosen.
        statuses: HTTP statuses that are right.
        make: random numbers and the model's length -> path, body, events after which to hang up.
    """

    name: str
    weight: int
    statuses: tuple[int, ...]
    make: Callable[[random.Random, int], tuple[str, dict[str, Any] | bytes, int | None]]


def make_text(rng: random.Random, low: int, high: int) -> str:
    """Return a text of random words."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))


def _limits(rng: random.Random, *, stream: bool) -> dict[str, Any]:
    return {
        "max_tokens": rng.randint(8, 64),
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "stream": stream,
        "ignore_eos": rng.random() < 0.5,
    }


def _completion(rng: random.Random, stream: bool, **more: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": make_text(rng, 4, 60), **_limits(rng, stream=stream), **more}


def _chat(rng: random.Random, stream: bool) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": make_text(rng, 4, 40)}]
    return CHAT, {"messages": messages, **_limits(rng, stream=stream)}


ACTIONS = (
    Action(
        name="stream", weight=30, statuses=(200,), make=lambda r, _: (*_completion(r, True), None)
    ),
    Action(
        name="chat stream", weight=20, statuses=(200,), make=lambda r, _: (*_chat(r, True), None)
    ),
    Action(
        name="whole", weight=10, statuses=(200,), make=lambda r, _: (*_completion(r, False), None)
    ),
    Action(
        name="two answers",
        weight=5,
        statuses=(200,),
        make=lambda r, _: (*_completion(r, True, n=2, temperature=0.8), None),
    ),
    Action(
        name="hang up in a stream",
        weight=12,
        statuses=(200,),
        make=lambda r, _: (*_completion(r, True), r.randint(1, 6)),
    ),
    Action(
        name="hang up at once",
        weight=8,
        statuses=(0,),
        make=lambda r, _: (*_chat(r, r.random() < 0.5), 0),
    ),
    Action(
        name="too long",
        weight=5,
        statuses=(400,),
        make=lambda r, n: (COMPLETIONS, {"prompt": "word " * 2 * n, "stream": True}, None),
    ),
    Action(
        name="no json",
        weight=4,
        statuses=(400,),
        make=lambda r, _: (COMPLETIONS, b'{"model": "m", "prompt": "a', None),
    ),
    Action(
        name="bad field",
        weight=4,
        statuses=(400,),
        make=lambda r, _: (*_completion(r, True, top_p=7), None),
    ),
    Action(
        name="unknown model",
        weight=2,
        statuses=(404,),
        make=lambda r, _: (*_completion(r, False, model="another"), None),
    ),
)


def judge(action: Action, reply: Reply, tally: Tally) -> None:
    """Count a reply; note it as a fault if it is not what the action calls for."""
    tally.counts[action.name] += 1
    is_complete = reply.is_whole or reply.was_cut
    if (
        reply.status not in action.statuses
        or not is_complete
        or b'"error"' in (reply.body if reply.status == 200 else b"")
    ):
        tally.faults.append(f"{action.name}: status {reply.status}: {reply.error_text}")
        return
    if reply.events_s:
        tally.ttfts_s.append(reply.events_s[0])
        tally.gaps_s += [b - a for a, b in zip(reply.events_s, reply.events_s[1:], strict=False)]
        tally.num_tokens += len(reply.events_s)


async def run_client(
    client: RawClient, seed: int, until_s: float, max_len: int, tally: Tally
) -> None:
    """Be one client until the time is over."""
    rng = random.Random(seed)
    weights = [action.weight for action in ACTIONS]
    while time.monotonic() < until_s:
        (action,) = rng.choices(ACTIONS, weights)
        path, body, cut_after = action.make(rng, max_len)
        try:
            reply = await asyncio.wait_for(client.post(path, body, cut_after=cut_after), 120)
        except (TimeoutError, OSError) as cause:
            tally.faults.append(f"{action.name}: {cause!r}")
            continue
        judge(action, reply, tally)


def measure_pss_mib(pid: int) -> float:
    """Return the memory of a process and all that it started, shared pages counted in part."""
    total = 0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total / 2**20


async def watch_memory(pid: int, start_s: float, until_s: float, tally: Tally) -> None:
    """Note the memory every few seconds."""
    while time.monotonic() < until_s:
        tally.pss_mib.append((time.monotonic() - start_s, measure_pss_mib(pid)))
        await asyncio.sleep(SAMPLE_S)


def find_growth_mib(samples: list[tuple[float, float]]) -> float:
    """Return how much the memory has grown in the last two minutes (or in the second half)."""
    end_s = samples[-1][0]
    begin_s = max(end_s - WINDOW_S, end_s / 2)
    late = [mib for at, mib in samples if at >= begin_s]
    edge = max(1, min(5, len(late) // 2))
    return statistics.median(late[-edge:]) - statistics.median(late[:edge])


async def measure_idle_ttft_s(client: RawClient) -> float:
    """Return the median time to the first token of a server with nothing else to do."""
    rng = random.Random(0)
    times = []
    for _ in range(9):
        reply = await client.post(*_completion(rng, True))
        times.append(reply.events_s[0])
    return statistics.median(times[2:])


async def is_drained(client: RawClient) -> bool:
    """Wait some seconds for every request to be gone and every block to be free."""
    for _ in range(50):
        stats = await client.get("/stats")
        if (
            stats["num_running_requests"] == stats["num_waiting_requests"] == 0
            and stats["num_free_gpu_blocks"] == stats["num_total_gpu_blocks"]
        ):
            return True
        await asyncio.sleep(0.1)
    return False


async def run_soak(args: argparse.Namespace, client: RawClient, pid: int) -> dict[str, Any]:
    """Run the load and return what was found."""
    card = (await client.get("/v1/models"))["data"][0]
    client.model = card["id"]
    idle_s = await measure_idle_ttft_s(client)
    tally = Tally()
    start_s = time.monotonic()
    until_s = start_s + 60 * args.minutes
    clients = [
        run_client(client, args.seed + i, until_s, card["max_model_len"], tally)
        for i in range(args.streams)
    ]
    await asyncio.gather(watch_memory(pid, start_s, until_s, tally), *clients)
    elapsed_s = time.monotonic() - start_s
    return summarise(tally, idle_s, elapsed_s, is_idle=await is_drained(client))


def summarise(tally: Tally, idle_s: float, elapsed_s: float, *, is_idle: bool) -> dict[str, Any]:
    """Return the figures and the verdict of every check."""
    growth = find_growth_mib(tally.pss_mib)
    ttfts = sorted(tally.ttfts_s)
    checks = {
        "no error that is not the client's": not tally.faults,
        f"memory grows less than {MAX_GROWTH_MIB:.0f} MiB at the end": growth < MAX_GROWTH_MIB,
        "every block is free at the end": is_idle,
        "every kind of request was made": len(tally.counts) == len(ACTIONS),
    }
    return {
        "checks": checks,
        "faults": tally.faults[:20],
        "num_faults": len(tally.faults),
        "requests": dict(tally.counts),
        "num_requests": sum(tally.counts.values()),
        "seconds": round(elapsed_s, 1),
        "stream_events_per_s": round(tally.num_tokens / elapsed_s, 1),
        "ttft_idle_median_ms": round(1000 * idle_s, 1),
        "ttft_median_ms": round(1000 * statistics.median(ttfts), 1),
        "ttft_p99_ms": round(1000 * ttfts[int(0.99 * (len(ttfts) - 1))], 1),
        "gap_median_ms": round(1000 * statistics.median(tally.gaps_s), 2),
        "pss_first_mib": round(tally.pss_mib[0][1], 1),
        "pss_last_mib": round(tally.pss_mib[-1][1], 1),
        "pss_growth_mib": round(growth, 1),
        "pss_mib": [(round(at, 1), round(mib, 1)) for at, mib in tally.pss_mib],
        "client_cpu_s": round(time.process_time(), 2),
    }


def start_server(args: argparse.Namespace) -> tuple[subprocess.Popen[bytes], int]:
    """Serve the model on a free port; returns the process and the port."""
    from tools.real_models import find_smollm2

    model = args.model or find_smollm2()
    if model is None:
        raise SystemExit("SmolLM2 is not installed: make models, or give --model or --port")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.scripts", "serve", str(model), "--host", "127.0.0.1", "--port",
        str(port), "--disable-log-requests", "--uvicorn-log-level", "warning", *args.serve_args,
    ]  # fmt: skip
    # A small cache is soon full: what grows after that is not the cache.
    env = {"VLLM_CPU_KVCACHE_SPACE": "0.25", **os.environ}
    return subprocess.Popen(command, cwd=ROOT, env=env), port


def wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the server listens."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise SystemExit("the server could not start")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit("the server is not ready after two minutes")


def main() -> int:
    """Run the soak; returns 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="length of the load")
    parser.add_argument("--streams", type=int, default=32, help="concurrent clients")
    parser.add_argument("--seed", type=int, default=0, help="of the clients' choices")
    parser.add_argument("--model", default=None, help="model to serve; SmolLM2 if unset")
    parser.add_argument("--port", type=int, default=None, help="port of a server that runs already")
    parser.add_argument("--pid", type=int, default=None, help="its process")
    parser.add_argument("--output", type=Path, default=RESULTS / "soak.json", help="result file")
    parser.add_argument("serve_args", nargs="*", help="flags for the server, behind --")
    args = parser.parse_args()
    process = None
    if args.port is None:
        process, port = start_server(args)
        wait_ready(process, port)
        pid = process.pid
    else:
        port, pid = args.port, args.pid
    try:
        result = asyncio.run(run_soak(args, RawClient(port, ""), pid))
    finally:
        if process is not None:
            process.terminate()
            process.wait(30)
    result |= {
        "setting": {"minutes": args.minutes, "streams": args.streams, "seed": args.seed},
        "machine": describe_machine(),
        "versions": describe_versions(),
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    shown = {key: value for key, value in result.items() if key not in ("pss_mib", "setting")}
    print(json.dumps(shown, indent=1))
    return 0 if all(result["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
