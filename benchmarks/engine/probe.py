"""Time an engine that has vLLM's Python API, one workload run per line of standard input.

Run by `compare_cpu.py` in each engine's own environment, so that the same lines measure this
project and its peer. Reads `{"batch": B, "prompt": P, "output": O, "seed": S}`, answers
`{"prefill_s": …, "total_s": …}`; never decides which engine is faster.
"""

import json
import os
import random
import sys
import time


def make_prompts(batch: int, length: int, seed: int, vocab: int) -> list[list[int]]:
    """Return random token ids, the same for every engine."""
    rng = random.Random(seed * 1000003 + batch * 101 + length)
    return [[rng.randrange(300, vocab - 300) for _ in range(length)] for _ in range(batch)]


def peak_rss_mib(pid: int) -> int:
    """Return the peak resident MiB of a process and its children."""
    total, todo = 0.0, [pid]
    while todo:
        process = todo.pop()
        try:
            with open(f"/proc/{process}/task/{process}/children") as file:
                todo += [int(child) for child in file.read().split()]
            with open(f"/proc/{process}/status") as file:
                total += next(int(x.split()[1]) for x in file if x.startswith("VmHWM")) / 1024
        except (OSError, StopIteration):
            continue
    return round(total)


def main() -> None:
    """Load the model named on the command line, then serve runs until standard input closes."""
    model, dtype, vocab = sys.argv[1], sys.argv[2], int(sys.argv[3])
    started = time.perf_counter()
    import vllm
    from vllm import LLM, SamplingParams

    more = json.loads(os.environ.get("PROBE_LLM_ARGS", "{}"))
    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=2048,
        enable_prefix_caching=False,
        seed=0,
        **{"max_num_seqs": 32, **more},
    )
    answers = os.fdopen(int(os.environ["PROBE_ANSWER_FD"]), "w")

    def answer(row: dict[str, object]) -> None:
        answers.write(json.dumps(row) + "\n")
        answers.flush()

    def run(prompts: list[list[int]], tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        seconds = time.perf_counter() - start
        if any(len(out.outputs[0].token_ids) != tokens for out in outputs):
            raise RuntimeError("an engine answered with the wrong number of tokens")
        return seconds

    answer({"version": vllm.__version__, "ready_s": time.perf_counter() - started})
    for line in sys.stdin:
        work = json.loads(line)
        batch, length, seed = work["batch"], work["prompt"], work["seed"]
        run(make_prompts(batch, length, 3 * seed, vocab), 1)  # an engine that was idle is cold
        prefill = run(make_prompts(batch, length, 3 * seed + 1, vocab), 1)
        total = run(make_prompts(batch, length, 3 * seed + 2, vocab), work["output"])
        answer({"prefill_s": prefill, "total_s": total, "peak_mib": peak_rss_mib(os.getpid())})


if __name__ == "__main__":
    main()
