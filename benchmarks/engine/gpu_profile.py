"""Where the time of a GPU engine's steps goes: kernels by name, and the time between them.

Runs one work of `gpu_offline.py` under torch's profiler and adds up the kernels of its prefill and
of its decode steps. Writes JSON.

    python benchmarks/engine/gpu_profile.py qwen2-7b --works 512:64:64 --output-json FILE

The prompts' part comes from the same work with one output; the rest is that of the decode steps.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.engine.gpu_offline import PLANS, SPREAD_WEIGHTS
from benchmarks.engine.shapes import SHAPES, write_shape
from benchmarks.machine import describe_machine, describe_versions
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

LONG_GAP_US = 3.0  # kernels of one graph wait less for each other


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--works", nargs="+", default=["512:64:1"], help="input:output:batch")
    parser.add_argument("--top", type=int, default=18, help="kernels that are shown")
    parser.add_argument("--spread-weights", action="store_true", help="so that tokens differ")
    parser.add_argument("--output-json", type=Path)
    return parser.parse_args()


def add_up(events: list[Any]) -> dict[str, Any]:
    """Return total and kernels of some GPU events."""
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in events:
        kernels[event.name].append(event.device_time_total)
    rows: list[dict[str, Any]] = [
        {"kernel": name[:110], "calls": len(us), "total_us": round(sum(us), 1)}
        for name, us in kernels.items()
    ]
    rows.sort(key=lambda row: -row["total_us"])
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    return {
        "kernel_us": round(sum(row["total_us"] for row in rows), 1),
        "span_us": round(spans[-1][1] - spans[0][0], 1) if spans else 0.0,
        "num_kernels": len(events),
        **sum_gaps(spans),
        "kernels": rows,
    }


def sum_gaps(spans: list[tuple[float, float]]) -> dict[str, float]:
    """Return how long the GPU waited between kernels, short and long waits apart.

    Args:
        spans: begin and end of each kernel in microseconds, ascending.
    """
    short_us = long_us = 0.0
    ended = spans[0][1] if spans else 0.0
    for begin, end in spans:
        gap = max(0.0, begin - ended)
        if gap < LONG_GAP_US:
            short_us += gap
        else:
            long_us += gap
        ended = max(ended, end)
    return {"short_gaps_us": round(short_us, 1), "long_gaps_us": round(long_us, 1)}


def write_json(path: Path, works: list[dict[str, Any]]) -> None:
    """Write what was found so far."""
    result = {
        "what": "kernels of one run of a work, by torch's profiler: prompts alone, and all",
        "command": " ".join(["python", "benchmarks/engine/gpu_profile.py", *sys.argv[1:]]),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "date": time.strftime("%Y-%m-%d"),
        "works": works,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def report(result: dict[str, Any], num_out: int, top: int) -> None:
    """Print where the time goes: prompts in all, and one decode step."""
    prompts, both, steps = result["prompts"], result["all"], max(1, num_out - 1)
    alone = {row["kernel"]: row for row in prompts["kernels"]}
    none = {"total_us": 0.0, "calls": 0}
    rest = [
        {
            "kernel": row["kernel"],
            "calls": (row["calls"] - alone.get(row["kernel"], none)["calls"]) / steps,
            "total_us": (row["total_us"] - alone.get(row["kernel"], none)["total_us"]) / steps,
        }
        for row in both["kernels"]
    ]
    rest.sort(key=lambda row: -row["total_us"])
    short_ms, long_ms = (
        (both[key] - prompts[key]) / steps / 1e3 for key in ("short_gaps_us", "long_gaps_us")
    )
    print(
        f"{result['shape']} {result['work']}: {result['seconds']:.3f} s unprofiled; "
        f"prompts: kernels {prompts['kernel_us'] / 1e3:.2f} of {prompts['span_us'] / 1e3:.2f} ms; "
        f"a decode step: "
        f"kernels {(both['kernel_us'] - prompts['kernel_us']) / steps / 1e3:.3f} of "
        f"{(both['span_us'] - prompts['span_us']) / steps / 1e3:.3f} ms, "
        f"{(both['num_kernels'] - prompts['num_kernels']) / steps:.0f} of them, "
        f"{short_ms:.3f} ms in gaps below {LONG_GAP_US:.0f} us, {long_ms:.3f} in longer ones"
    )
    for name, rows in (("prompts", prompts["kernels"]), ("step", rest)):
        for row in rows[:top]:
            each = row["total_us"] / row["calls"] if row["calls"] else 0.0
            print(
                f"  {name:8} {row['total_us'] / 1e3:9.3f} ms {row['calls']:7.1f} x {each:9.1f} us"
                f"  {row['kernel'][:90]}",
                flush=True,
            )


def main() -> int:
    """Profile, print and write."""
    args = parse_args()
    plan = PLANS[args.shape]
    vocab = SHAPES[args.shape]["vocab_size"]
    rng = random.Random(0)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(write_shape(args.shape, Path(folder))),
            load_format="dummy",
            model_loader_extra_config=SPREAD_WEIGHTS if args.spread_weights else None,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=plan.max_model_len,
            gpu_memory_utilization=plan.memory,
            max_num_seqs=256,
            enable_prefix_caching=False,
        )

        def draw_prompt(num_in: int) -> TokensPrompt:
            ids = [rng.randrange(10, vocab - 10) for _ in range(num_in)]
            return TokensPrompt(prompt_token_ids=ids)

        def run(num_in: int, num_out: int, batch: int) -> float:
            prompts = [draw_prompt(num_in) for _ in range(batch)]
            params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
            params.detokenize = False
            start_s = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - start_s

        def profile(num_in: int, num_out: int, batch: int) -> dict[str, Any]:
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
            ) as profiler:
                run(num_in, num_out, batch)
                torch.cuda.synchronize()
            return add_up([e for e in profiler.events() if e.device_time_total > 0])

        for work in args.works:
            num_in, num_out, batch = map(int, work.split(":"))
            run(num_in, num_out, batch)
            result = {
                "shape": args.shape,
                "work": work,
                "seconds": run(num_in, num_out, batch),
                "prompts": profile(num_in, 1, batch),
                "all": profile(num_in, num_out, batch),
            }
            results.append(result)
            report(result, num_out, args.top)
            if args.output_json:
                write_json(args.output_json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
