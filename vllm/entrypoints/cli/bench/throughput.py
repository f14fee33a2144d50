"""`vllm bench throughput`: requests and tokens per second of many requests at once, offline."""

from __future__ import annotations

import asyncio
import contextlib
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields

from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli.bench.dataset import Sample, sample_sharegpt
from vllm.entrypoints.cli.bench.summary import write_json
from vllm.errors import ConfigError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.utils.argument_parser import FlexibleArgumentParser, parse_positive


def make_parser() -> FlexibleArgumentParser:
    """Return the parser: the benchmark's options, then the engine's."""
    parser = FlexibleArgumentParser(prog="vllm bench throughput", description=__doc__)
    group = parser.add_argument_group("benchmark")
    group.add_argument("--backend", choices=["vllm", "hf", "mii"], default="vllm", help="vllm only")
    group.add_argument("--dataset", default=None, metavar="FILE", help="ShareGPT JSON file")
    group.add_argument(
        "--input-len", type=parse_positive, default=None, help="tokens of each prompt"
    )
    group.add_argument(
        "--output-len", type=parse_positive, default=None, help="tokens of each answer"
    )
    group.add_argument("--n", type=parse_positive, default=1, help="answers to each prompt")
    group.add_argument("--num-prompts", type=parse_positive, default=1000, help="requests")
    group.add_argument("--hf-max-batch-size", type=int, default=None, help="not served")
    group.add_argument("--async-engine", action="store_true", help="use the asynchronous engine")
    group.add_argument(
        "--disable-frontend-multiprocessing",
        action="store_true",
        help="with --async-engine: run the engine in this process",
    )
    group.add_argument("--output-json", default=None, metavar="FILE", help="where to write results")
    return EngineArgs.add_cli_args(parser)


def main(argv: Sequence[str]) -> int:
    """Run the measurement and print what it found."""
    args = make_parser().parse_args(argv)
    _check_args(args)
    samples = _make_samples(args)
    elapsed_s = asyncio.run(_run_async(args, samples)) if args.async_engine else _run(args, samples)
    total = sum(s.prompt_len + s.output_len * args.n for s in samples)
    result = {
        "elapsed_time": elapsed_s,
        "num_requests": len(samples),
        "total_num_tokens": total,
        "requests_per_second": len(samples) / elapsed_s,
        "tokens_per_second": total / elapsed_s,
    }
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} tokens/s"
    )
    if args.output_json:
        write_json(args.output_json, result)
    return 0


def _check_args(args: Namespace) -> None:
    if args.backend != "vllm":
        raise ConfigError(f"--backend {args.backend}: other engines are not part of this package")
    if args.dataset is None and (args.input_len is None or args.output_len is None):
        raise ConfigError("give --dataset, or both --input-len and --output-len")
    if args.dataset is not None and args.input_len is not None:
        raise ConfigError("--input-len cannot be combined with --dataset")


def _make_samples(args: Namespace) -> list[Sample]:
    if args.dataset is None:
        prompt = "hi" * max(1, args.input_len - 1)
        sample = Sample(prompt=prompt, prompt_len=args.input_len, output_len=args.output_len)
        return [sample] * args.num_prompts
    tokenizer = get_tokenizer(
        args.tokenizer or args.model, trust_remote_code=args.trust_remote_code
    )
    return sample_sharegpt(tokenizer, args.dataset, args.num_prompts, args.output_len, args.seed)


def _params(args: Namespace, sample: Sample) -> SamplingParams:
    return SamplingParams(
        n=args.n,
        temperature=1.0,
        top_p=1.0,
        ignore_eos=True,
        max_tokens=sample.output_len,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _run(args: Namespace, samples: Sequence[Sample]) -> float:
    """Run all requests through LLM; returns the seconds."""
    from vllm.entrypoints.llm import LLM  # noqa: PLC0415  --help needs no engine

    llm = LLM(**{f.name: getattr(args, f.name) for f in fields(EngineArgs)})
    prompts = [s.prompt for s in samples]
    params = [_params(args, s) for s in samples]
    start_s = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=True)
    return time.perf_counter() - start_s


async def _run_async(args: Namespace, samples: Sequence[Sample]) -> float:
    """Run all requests through the asynchronous engine; returns the seconds."""
    from vllm.engine.async_llm_engine import AsyncLLMEngine  # noqa: PLC0415  --help needs none

    names = [f.name for f in fields(AsyncEngineArgs) if hasattr(args, f.name)]
    engine_args = AsyncEngineArgs(
        **{name: getattr(args, name) for name in names}, disable_log_requests=True
    )
    engine = AsyncLLMEngine.from_engine_args(
        engine_args, in_own_process=not args.disable_frontend_multiprocessing
    )
    try:
        start_s = time.perf_counter()

        async def run_one(number: int, sample: Sample) -> None:
            stream = engine.generate(sample.prompt, _params(args, sample), f"bench-{number}")
            async with contextlib.aclosing(stream):
                async for _ in stream:
                    pass

        await asyncio.gather(*(run_one(i, s) for i, s in enumerate(samples)))
        return time.perf_counter() - start_s
    finally:
        engine.shutdown()
