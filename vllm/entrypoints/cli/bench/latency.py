"""`vllm bench latency`: how long one batch of requests takes, offline."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import numpy as np
from tqdm import tqdm

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.bench.summary import find_percentiles, write_json
from vllm.inputs import TokensPrompt
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.utils.argument_parser import FlexibleArgumentParser, parse_positive

RANKS = (10, 25, 50, 75, 90, 99)
_LARGEST_ID = 10_000


def make_parser() -> FlexibleArgumentParser:
    """Return the parser: the benchmark's options, then the engine's."""
    parser = FlexibleArgumentParser(prog="vllm bench latency", description=__doc__)
    group = parser.add_argument_group("benchmark")
    group.add_argument("--input-len", type=parse_positive, default=32, help="tokens of each prompt")
    group.add_argument(
        "--output-len", type=parse_positive, default=128, help="tokens of each answer"
    )
    group.add_argument("--batch-size", type=parse_positive, default=8, help="prompts in the batch")
    group.add_argument("--n", type=parse_positive, default=1, help="answers to each prompt")
    group.add_argument("--use-beam-search", action="store_true", help="beam search of width n")
    group.add_argument("--num-iters-warmup", type=int, default=10, help="batches not counted")
    group.add_argument("--num-iters", type=parse_positive, default=30, help="batches that count")
    group.add_argument("--profile", action="store_true", help="write a trace of one batch instead")
    group.add_argument("--profile-result-dir", default=None, help="where the trace is written")
    group.add_argument("--output-json", default=None, metavar="FILE", help="where to write results")
    return EngineArgs.add_cli_args(parser)


def main(argv: Sequence[str]) -> int:
    """Run the measurement and print what it found."""
    args = make_parser().parse_args(argv)
    run_batch = _prepare_batch(args)
    if args.profile:
        _run_warmup(run_batch, args.num_iters_warmup)
        return _write_trace(run_batch, args.profile_result_dir)
    _run_warmup(run_batch, args.num_iters_warmup)
    latencies = [run_batch() for _ in tqdm(range(args.num_iters), desc="Profiling iterations")]
    percentiles = find_percentiles(latencies, RANKS)
    print(f"Avg latency: {np.mean(latencies)} seconds")
    for rank, value in percentiles.items():
        print(f"{rank}% percentile latency: {value} seconds")
    if args.output_json:
        result = {
            "avg_latency": float(np.mean(latencies)),
            "latencies": latencies,
            "percentiles": {str(rank): value for rank, value in percentiles.items()},
        }
        write_json(args.output_json, result)
    return 0


def _prepare_batch(args: Namespace) -> Callable[[], float]:
    """Load the model; the function that is returned runs the batch once and returns the seconds."""
    from vllm.entrypoints.llm import LLM  # noqa: PLC0415  --help needs no engine

    llm = LLM(**{f.name: getattr(args, f.name) for f in fields(EngineArgs)})
    largest = min(_LARGEST_ID, llm.llm_engine.get_model_config().vocab_size)
    ids = np.random.default_rng(0).integers(0, largest, size=(args.batch_size, args.input_len))
    prompts = [TokensPrompt(prompt_token_ids=row) for row in ids.tolist()]
    params = SamplingParams(
        n=args.n, temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=args.output_len
    )
    beams = BeamSearchParams(beam_width=args.n, max_tokens=args.output_len, ignore_eos=True)

    def run_batch() -> float:
        start_s = time.perf_counter()
        if args.use_beam_search:
            llm.beam_search([prompt["prompt_token_ids"] for prompt in prompts], beams)
        else:
            llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start_s

    return run_batch


def _run_warmup(run_batch: Callable[[], float], num_iters: int) -> None:
    for _ in tqdm(range(num_iters), desc="Warmup iterations"):
        run_batch()


def _write_trace(run_batch: Callable[[], float], directory: str | None) -> int:
    from torch import profiler  # noqa: PLC0415  only with --profile

    target = Path(directory or "vllm_benchmark_result") / f"latency_result_{time.time():.0f}"
    handler = profiler.tensorboard_trace_handler(str(target)) if target else None
    with profiler.profile(on_trace_ready=handler) as trace, nullcontext():
        run_batch()
    print(trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))
    print(f"Trace written to {target}")
    return 0
