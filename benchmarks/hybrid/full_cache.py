"""What planning costs in a cache that is full, beside the same work in one that is empty.

A server's cache is full after a while, of prefixes that nobody holds, and every step that needs a
block makes room. No model runs here: the scheduler and the cache manager of the engine plan rounds
of the same work for published shapes, and every answer is the same token. Prints and writes the
median of a step and the time of a round, of the rounds before the cache was full and of those
after.

    python benchmarks/hybrid/full_cache.py [SHAPE ...] --rounds 5

To compare two versions of the engine, run each one's own copy with the same arguments.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks.engine.shapes import write_shape  # noqa: E402
from benchmarks.machine import describe_machine, describe_versions  # noqa: E402
from vllm.core.cache_manager import CacheManager  # noqa: E402
from vllm.core.capacity import make_layout  # noqa: E402
from vllm.core.scheduler import Scheduler  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.hybrid.grouping import group_layers  # noqa: E402
from vllm.sequence import SequenceRequest  # noqa: E402
from vllm.step import RowOutput, RowSampling, StepOutput, StepPlan  # noqa: E402
from vllm.worker.hybrid_plan import read_specs  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A round of one shape: `batch` prompts of `num_in` random tokens, `num_out` tokens each."""

    gib: float
    num_in: int
    num_out: int
    batch: int


WORKS: dict[str, Work] = {
    "qwen2-7b": Work(gib=12, num_in=512, num_out=256, batch=64),
    "gemma3-4b": Work(gib=18, num_in=512, num_out=256, batch=64),
    "qwen3-next-small": Work(gib=27, num_in=512, num_out=256, batch=64),
    "nemotron-h-8b": Work(gib=24, num_in=512, num_out=256, batch=64),
    "qwen2-hybrid": Work(gib=80, num_in=8192, num_out=256, batch=64),
}


def make_scheduler(name: str, work: Work) -> tuple[CacheManager, Scheduler]:
    """Return what plans a shape, with the cache groups that the engine would make."""
    with tempfile.TemporaryDirectory() as folder:
        config = EngineArgs(
            model=str(write_shape(name, Path(folder))),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=16384,
            max_num_batched_tokens=8192,
            hybrid_mode=True,
        ).create_engine_config()
        specs = read_specs(config, config.hybrid)
    groups = group_layers(specs, config.hybrid, config.cache_config.block_size)
    layout, _ = make_layout(
        [groups],
        [int(work.gib * 2**30)],
        max_model_len=config.model_config.max_model_len,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
    )
    cache = CacheManager(groups, layout, enable_prefix_caching=True)
    return cache, Scheduler(config.scheduler_config, cache)


def answer(plan: StepPlan) -> StepOutput:
    """Return the output of a model that always says 5."""
    rows = [RowOutput(seq_id=row.seq_id, token_ids=[5] * row.num_samples) for row in plan.rows]
    return StepOutput(step=plan.step, rows=rows)


def run_round(scheduler: Scheduler, requests: Sequence[SequenceRequest]) -> list[float]:
    """Serve requests to their ends; return the seconds of each step's planning."""
    for request in requests:
        scheduler.add(request)
    times = []
    while scheduler.has_unfinished:
        start_s = time.perf_counter()
        plan = scheduler.schedule()
        times.append(time.perf_counter() - start_s)
        if plan.is_empty:
            scheduler.take_results()
        else:
            scheduler.update(plan, answer(plan))
    return times


def measure(name: str, num_rounds: int) -> dict[str, Any]:
    """Fill the cache of a shape round by round, then plan some more."""
    work = WORKS[name]
    cache, scheduler = make_scheduler(name, work)
    rng, numbers = random.Random(0), count()

    def run() -> list[float]:
        requests = [
            SequenceRequest(
                request_id=str(next(numbers)),
                prompt_token_ids=rng.choices(range(100000), k=work.num_in),
                sampling=RowSampling(),
                max_tokens=work.num_out,
                eos_token_id=None,
                arrival_time=0.0,
            )
            for _ in range(work.batch)
        ]
        return run_round(scheduler, requests)

    before = [run()]
    num_cached = 0
    while (now := sum(g.num_cached_blocks for g in cache.group_usage())) > 1.1 * num_cached:
        num_cached = now
        before.append(run())
    if len(before) > 2:
        before.pop()  # in that one the cache became full
    after = [run() for _ in range(num_rounds)]

    def describe(rounds: list[list[float]]) -> dict[str, float]:
        return {
            "round_ms": round(1e3 * statistics.median(map(sum, rounds)), 2),
            "median_step_ms": round(1e3 * statistics.median(t for r in rounds for t in r), 4),
            "worst_step_ms": round(1e3 * max(t for r in rounds for t in r), 2),
        }

    empty, full = describe(before), describe(after)
    return {
        "model": name,
        "cache_gib": work.gib,
        "input": work.num_in,
        "output": work.num_out,
        "batch": work.batch,
        "cached_blocks": num_cached,
        "empty": empty,
        "full": full,
        "full_over_empty": round(full["round_ms"] / empty["round_ms"], 2),
    }


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=list(WORKS), help="which shapes; all")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in the full cache")
    parser.add_argument("--output-json", type=Path, default=RESULTS / "full_cache.json")
    args = parser.parse_args()
    rows = []
    for name in args.shapes:
        rows.append(row := measure(name, args.rounds))
        print(
            f"{name:18} a round: empty {row['empty']['round_ms']:9.1f} ms, full "
            f"{row['full']['round_ms']:9.1f} ms, {row['full_over_empty']:6.1f} times",
            flush=True,
        )
    result = {
        "what": "planning of rounds of requests, in an empty and in a full cache, no model",
        "command": f"python benchmarks/hybrid/full_cache.py --rounds {args.rounds}",
        "machine": describe_machine(),
        "versions": describe_versions(),
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    args.output_json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
