"""Offline throughput on a GPU, beside recorded figures of a peer on the same work.

For each model shape a process of its own loads made-up bfloat16 weights and answers batches of
random token ids: greedy, ends ignored, one warm-up of the same batch, then the median of the runs.
Prints a table with the ratio to the peer and writes JSON.

    python benchmarks/engine/gpu_offline.py [SHAPE ...] --runs 3 --output-json FILE

Weights are made as the peer makes its own (load_format dummy: every tensor uniform within 0.001,
from one seed), with --spread-weights so that layers matter as in a trained model. What a mixture
costs depends on how many of its experts the tokens of a batch meet: random prompts meet all, with
--same-prompts the rows of a batch choose alike as soon as they decode, and with --tied-experts,
where routers are all zeros, every token chooses the same ones. That is what the peer's DeepSeek-V2
does with such weights: its scores are bfloat16 after the softmax, where all experts tie.

With --start-together all processes load at once, which saves time on the machine (but their times
until the first answer mean nothing then); they still measure one after the other.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.engine.shapes import SHAPES, write_shape
from benchmarks.machine import describe_machine, describe_versions

RESULTS = Path(__file__).resolve().parents[1] / "results"
PEER = RESULTS / "h200_peer.json"
SPREAD_WEIGHTS = {"range": 0.035, "norms": "one", "seed": "name"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a shape is measured.

    Attributes:
        memory: share of the card (gpu_memory_utilization).
        works: (input tokens, output tokens, batch).
    """

    memory: float
    max_model_len: int
    works: tuple[tuple[int, int, int], ...]


_LONG = ((512, 256, 1), (512, 256, 64), (8192, 256, 32))
PLANS: dict[str, Plan] = {
    "qwen2-7b": Plan(
        memory=0.9,
        max_model_len=8192,
        works=(*((512, 256, batch) for batch in (1, 4, 8, 16, 64, 256)), (4096, 1, 16)),
    ),
    "gemma3-4b": Plan(
        memory=0.2,
        max_model_len=32768,
        works=((512, 256, 1), (512, 256, 64), (16384, 128, 32)),
    ),
    "qwen3-next-small": Plan(memory=0.3, max_model_len=32768, works=_LONG),
    "nemotron-h-8b": Plan(memory=0.3, max_model_len=32768, works=_LONG),
    "deepseek-v2-lite": Plan(memory=0.4, max_model_len=32768, works=_LONG),
    "qwen2-hybrid": Plan(memory=0.9, max_model_len=8448, works=_LONG[:2]),
}


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=list(PLANS), help="which shapes; all")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--works", help="instead of the plan's, as 512:256:1,512:256:8")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--max-num-batched-tokens", type=int, help="instead of the default")
    parser.add_argument("--spread-weights", action="store_true", help="see above")
    parser.add_argument("--same-prompts", action="store_true", help="one prompt a batch, see above")
    parser.add_argument("--tied-experts", action="store_true", help="routers of zeros, see above")
    parser.add_argument("--start-together", action="store_true")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="other fields of the engine"
    )
    parser.add_argument(
        "--memory", nargs="*", default=[], metavar="SHAPE=SHARE", help="other shares of the card"
    )
    parser.add_argument("--output-json", type=Path, default=RESULTS / "h200_offline.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def read_works(text: str) -> tuple[tuple[int, int, int], ...]:
    """Read works such as 512:256:1,512:256:8."""
    works = (map(int, work.split(":")) for work in text.split(","))
    return tuple((num_in, num_out, batch) for num_in, num_out, batch in works)


def read_field(text: str) -> tuple[str, Any]:
    """Read a field of the engine, such as tensor_parallel_size=2 or kv_cache_dtype=fp8."""
    field, _, value = text.partition("=")
    try:
        return field, json.loads(value)
    except ValueError:
        return field, value


def tie_experts() -> None:
    """Have this process make up routers of zeros."""
    from vllm.model_executor.model_loader import loader
    from vllm.model_executor.model_loader.dummy import iterate_dummy

    def iterate(*args: Any) -> Iterator[tuple[str, Any]]:
        for name, values in iterate_dummy(*args):
            yield name, values.zero_() if name.endswith(".mlp.gate.weight") else values

    patch.object(loader, "iterate_dummy", iterate).start()


def measure(name: str, args: argparse.Namespace) -> None:
    """Measure one shape in this process; prints one JSON line a row."""
    started_s = time.perf_counter()
    import torch

    from vllm import LLM, SamplingParams, __version__
    from vllm.inputs import TokensPrompt

    if args.tied_experts:
        tie_experts()
    plan = PLANS[name]
    shares = dict(pair.split("=") for pair in args.memory)
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(write_shape(name, Path(folder))),
            load_format="dummy",
            model_loader_extra_config=SPREAD_WEIGHTS if args.spread_weights else None,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=plan.max_model_len,
            gpu_memory_utilization=float(shares.get(name, plan.memory)),
            max_num_seqs=256,
            max_num_batched_tokens=args.max_num_batched_tokens,
            seed=0,
            enforce_eager=args.enforce_eager,
            enable_prefix_caching=not args.same_prompts,  # else no prompt but one were computed
            **dict(read_field(pair) for pair in args.set),
        )
        vocab = SHAPES[name]["vocab_size"]
        rng = random.Random(0)

        def draw_prompt(num_in: int) -> TokensPrompt:
            ids = [rng.randrange(10, vocab - 10) for _ in range(num_in)]
            return TokensPrompt(prompt_token_ids=ids)

        def run(num_in: int, num_out: int, batch: int) -> float:
            prompts = [draw_prompt(num_in) for _ in range(1 if args.same_prompts else batch)]
            if args.same_prompts:
                prompts *= batch
            params = SamplingParams(
                temperature=0.0, max_tokens=num_out, ignore_eos=True, detokenize=False
            )
            start_s = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            took_s = time.perf_counter() - start_s
            assert all(len(o.outputs[0].token_ids) == num_out for o in outputs)
            return took_s

        load_s = time.perf_counter() - started_s
        run(16, 1, 1)
        ready = {
            "startup_s": round(load_s, 2),
            "first_answer_s": round(time.perf_counter() - started_s, 2),
            "version": __version__,
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(),
        }
        print(json.dumps({"ready": ready}), flush=True)
        sys.stdin.readline()  # the parent says when the machine is ours
        for work in read_works(args.works) if args.works else plan.works:
            num_in, num_out, batch = work
            times = [run(*work) for _ in range(args.runs + 1)][1:]
            median_s = statistics.median(times)
            row = {
                "model": name,
                "input": num_in,
                "output": num_out,
                "batch": batch,
                "median_s": median_s,
                "min_s": min(times),
                "max_s": max(times),
                "out_tok_s": batch * num_out / median_s,
                "total_tok_s": batch * (num_in + num_out) / median_s,
            }
            print(json.dumps({"row": row}), flush=True)


def find_peer(row: dict[str, Any]) -> float | None:
    """Return the peer's seconds for the same work, None where it has none."""
    if not PEER.is_file():
        return None
    keys = ("model", "input", "output", "batch")
    for peer in json.loads(PEER.read_text())["rows"]:
        if all(peer[key] == row[key] for key in keys):
            return float(peer["median_s"])
    return None


def start_child(name: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    """Start the process of one shape; it loads, says that it is ready, and waits for a line."""
    command = [sys.executable, __file__, "--child", name, "--runs", str(args.runs)]
    command += ["--works", args.works] if args.works else []
    command += ["--enforce-eager"] if args.enforce_eager else []
    if args.max_num_batched_tokens:
        command += ["--max-num-batched-tokens", str(args.max_num_batched_tokens)]
    command += ["--spread-weights"] if args.spread_weights else []
    command += ["--same-prompts"] if args.same_prompts else []
    command += ["--tied-experts"] if args.tied_experts else []
    command += ["--memory", *args.memory] if args.memory else []
    command += ["--set", *args.set] if args.set else []
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_child(
    name: str, child: subprocess.Popen[str], args: argparse.Namespace, result: dict[str, Any]
) -> None:
    """Let one process measure and take in what it prints."""
    assert child.stdin is not None and child.stdout is not None
    for line in child.stdout:
        if not line.startswith('{"r'):
            continue
        message = json.loads(line)
        if "ready" in message:
            result["ready"][name] = message["ready"]
            print(f"{name}: ready in {message['ready']['first_answer_s']} s", flush=True)
            child.stdin.write("go\n")
            child.stdin.flush()
            continue
        add_row(message["row"], result)
        args.output_json.write_text(json.dumps(result, indent=1) + "\n")
    if child.wait():
        result["failed"].append(name)
        args.output_json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{name}: failed with exit status {child.returncode}", flush=True)


def add_row(row: dict[str, Any], result: dict[str, Any]) -> None:
    """Put a row beside the peer's, print it and keep it."""
    peer_s = find_peer(row)
    row["peer_s"] = peer_s
    row["times_peer"] = None if peer_s is None else peer_s / row["median_s"]
    result["rows"].append(row)
    ratio = "" if peer_s is None else f"  {row['times_peer']:.3f} times the peer"
    print(
        f"{row['model']:18} {row['input']:6}:{row['output']:<4} x {row['batch']:<4}"
        f"{row['median_s']:9.3f} s {row['out_tok_s']:10.1f} out tok/s{ratio}",
        flush=True,
    )


def main() -> int:
    """Measure every shape that was asked for."""
    args = parse_args()
    if args.child:
        measure(args.child, args)
        return 0
    result: dict[str, Any] = {
        "what": "offline throughput, made-up bfloat16 weights, greedy, medians",
        "command": " ".join(["python", "benchmarks/engine/gpu_offline.py", *sys.argv[1:]]),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "date": time.strftime("%Y-%m-%d"),
        "runs": args.runs,
        "weights": SPREAD_WEIGHTS if args.spread_weights else "load_format dummy, as the peer",
        "ready": {},
        "rows": [],
        "failed": [],
    }
    started = {name: start_child(name, args) for name in args.shapes if args.start_together}
    for name in args.shapes:
        run_child(name, started.get(name) or start_child(name, args), args, result)
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
