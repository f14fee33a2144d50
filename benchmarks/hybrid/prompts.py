"""How fast are long prompts where the last layers have windows? Hybrid and vanilla in turn.

Two engines in one process serve the same made-up weights and answer the same random prompts with
one token. In hybrid mode the last layers leave out what no answer can see; vanilla runs all tokens
through all layers. Prints the medians and whether all answers are equal; writes JSON. Exits with 1
on a CPU if answers differ (on a GPU near ties may fall either way).

    python benchmarks/hybrid/prompts.py --shape gemma3-4b --shrink 5 --input-len 4096
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks.engine.shapes import SHAPES  # noqa: E402
from benchmarks.machine import describe_machine, describe_versions  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
_SHRUNK = ("hidden_size", "intermediate_size", "head_dim", "sliding_window", "vocab_size")


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="gemma3-4b", choices=sorted(SHAPES))
    parser.add_argument("--shrink", type=int, default=1, help="divides widths and windows")
    parser.add_argument("--input-len", type=int, default=16384)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--num-gpu-blocks", type=int, help="of each engine; two share a card")
    parser.add_argument("--output-json", type=Path, default=RESULTS / "hybrid_prompts.json")
    return parser.parse_args()


def shrink(config: dict[str, Any], divisor: int) -> dict[str, Any]:
    """Return a config of the same layers, its widths and windows divided, multiples of 64."""
    sizes = {name: -(-config[name] // divisor // 64) * 64 for name in _SHRUNK if name in config}
    return {**config, **sizes} if divisor > 1 else config


def main() -> int:
    """Measure, print and write."""
    args = parse_args()
    config = shrink(SHAPES[args.shape], args.shrink)
    is_cpu = not torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        engines = {
            mode: LLM(
                directory,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype="bfloat16",
                max_model_len=args.input_len + 16,
                max_num_seqs=max(2, args.batch_size),
                hybrid_mode=mode,
                num_gpu_blocks_override=args.num_gpu_blocks,
            )
            for mode in (False, True)
        }
    generator = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    times: dict[bool, list[float]] = {False: [], True: []}
    is_equal = True
    for pair in range(args.pairs + 1):  # the first warms up
        ids = [
            [generator.randrange(10, config["vocab_size"]) for _ in range(args.input_len)]
            for _ in range(args.batch_size)
        ]
        prompts = [TokensPrompt(prompt_token_ids=row) for row in ids]
        answers = {}
        for mode in (False, True) if pair % 2 else (True, False):
            start_s = time.perf_counter()
            outputs = engines[mode].generate(prompts, params, use_tqdm=False)
            if pair:
                times[mode].append(time.perf_counter() - start_s)
            answers[mode] = [output.outputs[0].token_ids for output in outputs]
        is_equal = is_equal and answers[False] == answers[True]
    medians = {mode: statistics.median(found) for mode, found in times.items()}
    result = {
        "command": "python benchmarks/hybrid/prompts.py " + " ".join(sys.argv[1:]),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "date": time.strftime("%Y-%m-%d"),
        "config": config,
        "input_len": args.input_len,
        "batch_size": args.batch_size,
        "median_vanilla_s": medians[False],
        "median_hybrid_s": medians[True],
        "vanilla_by_hybrid": medians[False] / medians[True],
        "answers_equal": is_equal,
        "vanilla_s": times[False],
        "hybrid_s": times[True],
    }
    args.output_json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"vanilla / hybrid: {result['vanilla_by_hybrid']:.3f}; answers equal: {is_equal}")
    return 0 if is_equal or not is_cpu else 1


if __name__ == "__main__":
    sys.exit(main())
