"""What does hybrid mode cost where it has nothing to do? Alternating pairs on a uniform model.

Two engines in one process serve the same model, vanilla and with `hybrid_mode=True`, and answer the
same prompts in turn. Prints the median of the paired ratios and whether all answers are equal;
writes JSON. Exits with 1 if answers differ.

    python benchmarks/hybrid/uniform_cost.py MODEL --pairs 20
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks.machine import describe_machine, describe_versions  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--output-json", type=Path, default=RESULTS / "hybrid_uniform_cost.json")
    return parser.parse_args()


def main() -> int:
    """Measure, print and write."""
    args = parse_args()
    engines = {
        mode: LLM(args.model, dtype="bfloat16", hybrid_mode=mode, enable_prefix_caching=False)
        for mode in (False, True)
    }
    generator = torch.Generator().manual_seed(0)
    shape = (args.batch_size, args.input_len)
    ids = torch.randint(100, 20000, shape, generator=generator).tolist()
    prompts = [TokensPrompt(prompt_token_ids=row) for row in ids]
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)

    def run(mode: bool) -> tuple[float, list[tuple[int, ...]]]:
        start_s = time.perf_counter()
        outputs = engines[mode].generate(prompts, params, use_tqdm=False)
        took_s = time.perf_counter() - start_s
        return took_s, [tuple(o.outputs[0].token_ids) for o in outputs]

    run(False), run(True)  # warm
    times: dict[bool, list[float]] = {False: [], True: []}
    is_equal = True
    for pair in range(args.pairs):
        answers = {}
        for mode in (False, True) if pair % 2 == 0 else (True, False):
            took_s, answers[mode] = run(mode)
            times[mode].append(took_s)
        is_equal = is_equal and answers[False] == answers[True]
    ratios = [h / v for v, h in zip(times[False], times[True], strict=True)]
    result = {
        "command": f"python benchmarks/hybrid/uniform_cost.py MODEL --pairs {args.pairs}",
        "model": Path(args.model).name,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "date": time.strftime("%Y-%m-%d"),
        "batch_size": args.batch_size,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "median_vanilla_s": statistics.median(times[False]),
        "median_hybrid_s": statistics.median(times[True]),
        "median_ratio": statistics.median(ratios),
        "answers_equal": is_equal,
        "vanilla_s": times[False],
        "hybrid_s": times[True],
    }
    args.output_json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"hybrid / vanilla: {result['median_ratio']:.4f}; answers equal: {is_equal}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
