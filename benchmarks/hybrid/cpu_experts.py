"""Steps of two small mixtures on a CPU, with biased experts and ungated ones: two trees in turn.

Weights are made up; the sizes are those of gpt-oss and Nemotron-H, scaled down. Measures the median
step of a batch that decodes, and a step that computes a prompt. With `--before` another checkout,
with its own compiled ops, is measured in turn with this one, each time in a new process; the result
has the medians of the turns. Times are processor time on one thread, in which other work on the
machine does not count.

    python benchmarks/hybrid/cpu_experts.py --before ../before
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # behind PYTHONPATH, which says what is measured

from benchmarks.machine import describe_machine, describe_versions  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402

WEIGHTS = {"range": 0.05, "norms": "one", "seed": "name"}
BATCHES = (1, 8, 32)
NUM_STEPS = 40
PROMPT_LEN = 256

COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss-like": {
        **COMMON,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "nemotron-h-like": {
        **COMMON,
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "MEME*EME",
        "num_hidden_layers": 8,
        "intermediate_size": 1024,
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "ssm_state_size": 64,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "moe_shared_expert_intermediate_size": 512,
    },
}
"""Four layers of experts each, 16 of them with an inner size of 512, of which a token takes 4."""


def run_batch(llm: LLM, batch_size: int, prompt_len: int, num_steps: int) -> list[float]:
    """Return the seconds of each step of a batch; the first ones compute its prompts."""
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
    for row in range(batch_size):
        ids = [100 + (row * 977 + place * 37) % 8000 for place in range(prompt_len)]
        engine.add_request(f"{row}", TokensPrompt(prompt_token_ids=ids), params)
    times_s = []
    while engine.has_unfinished_requests():
        start_s = time.process_time()
        engine.step()
        times_s.append(time.process_time() - start_s)
    return times_s


def measure(config: dict[str, Any]) -> dict[str, float]:
    """Return the milliseconds of a model's steps."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = LLM(
            folder,
            load_format="dummy",
            model_loader_extra_config=WEIGHTS,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=512,
            max_num_seqs=max(BATCHES),
            enable_prefix_caching=False,
        )
    run_batch(llm, max(BATCHES), 16, 4)  # warm
    steps = {}
    for batch_size in BATCHES:
        times_s = run_batch(llm, batch_size, 8, NUM_STEPS)
        steps[f"decode {batch_size}"] = statistics.median(times_s[2:]) * 1e3
    prompts_s = [run_batch(llm, 1, PROMPT_LEN, 2)[0] for _ in range(7)]
    steps[f"prompt {PROMPT_LEN}"] = statistics.median(prompts_s) * 1e3
    return steps


def measure_tree(tree: Path) -> dict[str, dict[str, float]]:
    """Return the milliseconds of all models' steps with the engine in `tree`."""
    command = [sys.executable, __file__, "--measure"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    answer: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def compare(before: Path, turns: int) -> dict[str, object]:
    """Return the medians of both trees, measured in turn."""
    trees = {"before_ms": before, "after_ms": ROOT}
    found: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in trees}
    for turn in range(turns):
        for name in trees if turn % 2 == 0 else reversed(trees):
            found[name].append(measure_tree(trees[name]))
            print(json.dumps({name: found[name][-1]}), flush=True)
    rows = []
    for model in MODELS:
        for step in found["after_ms"][0][model]:
            row: dict[str, Any] = {"model": model, "step": step}
            for name, answers in found.items():
                row[name] = round(statistics.median(a[model][step] for a in answers), 3)
            rows.append({**row, "times": round(row["before_ms"] / row["after_ms"], 2)})
    return {
        "what": "a step of mixtures whose experts have biases or no gate: processor time of one "
        "thread, medians",
        "command": f"python benchmarks/hybrid/cpu_experts.py --before DIR --turns {turns}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "models": MODELS,
        "rows": rows,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="print the figures of one tree")
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument(
        "--output-json", type=Path, default=ROOT / "benchmarks/results/cpu_experts.json"
    )
    args = parser.parse_args()
    if args.measure or args.before is None:
        print(json.dumps({name: measure(config) for name, config in MODELS.items()}))
        return
    result = compare(args.before.resolve(), args.turns)
    args.output_json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["rows"], indent=1))


if __name__ == "__main__":
    main()
