"""Where the time of a GPU engine's steps goes: kernels by name, and the time between them.

Runs one work of `gpu_offline.py` under torch's profiler and adds up the kernels of its prefill and
of its decode steps. Writes JSON.

    python benchmarks/engine/gpu_profile.py qwen2-7b --work 512:64:64 --output-json FILE
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
from gpu_offline import PLANS
from shapes import SHAPES, write_shape

from vllm import LLM, SamplingParams


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--works", nargs="+", default=["512:64:1"], help="input:output:batch")
    parser.add_argument("--top", type=int, default=18, help="kernels that are shown")
    parser.add_argument("--output-json", type=Path)
    return parser.parse_args()


def add_up(events: list[Any]) -> dict[str, Any]:
    """Return total and kernels of some GPU events."""
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in events:
        kernels[event.name].append(event.device_time_total)
    rows = [
        {"kernel": name[:110], "calls": len(us), "total_us": round(sum(us), 1)}
        for name, us in kernels.items()
    ]
    rows.sort(key=lambda row: -row["total_us"])
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    return {
        "kernel_us": round(sum(row["total_us"] for row in rows), 1),
        "span_us": round(spans[-1][1] - spans[0][0], 1) if spans else 0.0,
        "num_kernels": len(events),
        "kernels": rows,
    }


def main() -> int:
    """Profile, print and write."""
    args = parse_args()
    plan = PLANS[args.shape]
    rng = random.Random(0)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(write_shape(args.shape, Path(folder))),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=plan.max_model_len,
            gpu_memory_utilization=plan.memory,
            max_num_seqs=256,
            enable_prefix_caching=False,
        )

        def run(num_in: int, num_out: int, batch: int) -> float:
            vocab = SHAPES[args.shape]["vocab_size"]
            prompts = [
                {"prompt_token_ids": [rng.randrange(10, vocab - 10) for _ in range(num_in)]}
                for _ in range(batch)
            ]
            params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
            params.detokenize = False
            start_s = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - start_s

        for work in args.works:
            num_in, num_out, batch = map(int, work.split(":"))
            run(num_in, num_out, batch)
            seconds = run(num_in, num_out, batch)
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
            ) as profile:
                run(num_in, num_out, batch)
                torch.cuda.synchronize()
            events = [e for e in profile.events() if e.device_time_total > 0]
            result = {"shape": args.shape, "work": work, "seconds": seconds, **add_up(events)}
            results.append(result)
            print(
                f"{args.shape} {work}: {seconds:.3f} s unprofiled; {result['num_kernels']} kernels "
                f"take {result['kernel_us'] / 1e6:.3f} s of {result['span_us'] / 1e6:.3f} s"
            )
            for row in result["kernels"][: args.top]:
                each = row["total_us"] / row["calls"]
                print(
                    f"  {row['total_us'] / 1e3:9.2f} ms {row['calls']:6} x {each:9.1f} us"
                    f"  {row['kernel'][:90]}",
                    flush=True,
                )
            if args.output_json:
                args.output_json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
