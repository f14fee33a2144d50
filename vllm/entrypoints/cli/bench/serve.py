"""`vllm bench serve`: latencies and throughput of a running server under a given load."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from vllm import envs
from vllm.entrypoints.cli.bench.dataset import (
    RandomShape,
    Sample,
    SonnetShape,
    sample_random,
    sample_sharegpt,
    sample_sonnets,
)
from vllm.entrypoints.cli.bench.load_client import LoadTarget, RequestResult, send_request
from vllm.entrypoints.cli.bench.serve_args import make_parser
from vllm.entrypoints.cli.bench.serve_report import make_report, print_report
from vllm.entrypoints.cli.bench.summary import write_json
from vllm.errors import ConfigError, VllmError
from vllm.transformers_utils.tokenizer import get_tokenizer

if TYPE_CHECKING:
    from aiohttp import ClientSession
    from transformers import PreTrainedTokenizerBase

_TIMEOUT_S = 6 * 3600


def main(argv: Sequence[str]) -> int:
    """Run the measurement, print the table and write the result file."""
    args = make_parser().parse_args(argv)
    try:
        import aiohttp  # noqa: F401, PLC0415  an optional dependency
    except ImportError as cause:
        raise ConfigError("aiohttp is missing: pip install 'vllm-hybrid[bench]'") from cause
    tokenizer = get_tokenizer(
        args.tokenizer or args.model, trust_remote_code=args.trust_remote_code, without_torch=True
    )
    samples = make_samples(args, tokenizer)
    target = make_target(args)
    start_s = time.perf_counter()
    results, duration_s = asyncio.run(run_load(args, target, samples))
    report = make_report(
        results, duration_s, tokenizer, args.selected_metrics, args.ranks, args.goals
    )
    print_report(report, args.selected_metrics, args.ranks)
    if args.save_result:
        path = _result_path(args)
        write_json(path, {**_describe_run(args), **report})
        print(f"Result written to {path} after {time.perf_counter() - start_s:.0f} s")
    failed = [r for r in results if not r.is_success]
    if failed:
        print(f"{len(failed)} of {len(results)} requests failed; first: {failed[0].error}")
    return 1 if len(failed) == len(results) else 0


def make_target(args: Namespace) -> LoadTarget:
    """Return where requests go."""
    base = args.base_url or f"http://{args.host}:{args.port}"
    is_chat = args.backend == "openai-chat"
    endpoint = args.endpoint
    if is_chat and endpoint == "/v1/completions":
        endpoint = "/v1/chat/completions"
    return LoadTarget(
        url=base.rstrip("/") + endpoint,
        model=args.served_model_name or args.model,
        api_key=envs.OPENAI_API_KEY or "EMPTY",
        is_chat=is_chat,
        best_of=args.best_of,
        logprobs=args.logprobs,
        ignore_eos=args.ignore_eos,
        use_beam_search=args.use_beam_search,
    )


def make_samples(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Return the requests of the load.

    Raises:
        ConfigError: the data set needs a file that is not given or not readable.
    """
    path = args.dataset_path or args.dataset
    if args.dataset_name == "random":
        shape = RandomShape(
            input_len=args.random_input_len,
            output_len=args.random_output_len,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
        )
        return sample_random(tokenizer, args.num_prompts, shape, args.seed)
    if not path:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path")
    if args.dataset_name == "sharegpt":
        return sample_sharegpt(
            tokenizer, path, args.num_prompts, args.sharegpt_output_len, args.seed
        )
    sonnet = SonnetShape(
        input_len=args.sonnet_input_len,
        output_len=args.sonnet_output_len,
        prefix_len=args.sonnet_prefix_len,
    )
    return sample_sonnets(tokenizer, path, args.num_prompts, sonnet, args.seed)


async def pace_samples(
    samples: Sequence[Sample], request_rate: float, seed: int
) -> AsyncIterator[Sample]:
    """Yield samples at the times of a Poisson process; an infinite rate yields all at once.

    The times are drawn in advance, so a late wake-up does not lower the rate.
    """
    if np.isinf(request_rate):
        for sample in samples:
            yield sample
        return
    gaps = np.random.default_rng(seed).exponential(1.0 / request_rate, len(samples))
    due = np.cumsum(gaps) - gaps[0]
    start_s = time.perf_counter()
    for sample, at in zip(samples, due.tolist(), strict=True):
        await asyncio.sleep(max(0.0, start_s + at - time.perf_counter()))
        yield sample


async def run_load(
    args: Namespace, target: LoadTarget, samples: Sequence[Sample]
) -> tuple[list[RequestResult], float]:
    """Send one request to see that the server answers, then the load; returns results and seconds.

    Raises:
        VllmError: the first request fails.
    """
    import aiohttp  # noqa: PLC0415  checked by main

    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=timeout, connector=connector)
        )
        first = await send_request(session, target, samples[0])
        if not first.is_success:
            raise VllmError(f"the test request to {target.url} failed: {first.error}")
        if args.profile:
            await _call_profiler(session, target, "start_profile")
        bar = stack.enter_context(tqdm(total=len(samples), disable=args.disable_tqdm))
        limit = asyncio.Semaphore(args.max_concurrency) if args.max_concurrency else nullcontext()

        async def run_one(sample: Sample) -> RequestResult:
            async with limit:
                result = await send_request(session, target, sample)
            bar.update()
            return result

        start_s = time.perf_counter()
        tasks = []
        async for sample in pace_samples(samples, args.request_rate, args.seed):
            tasks.append(asyncio.create_task(run_one(sample)))
        results = await asyncio.gather(*tasks)
        duration_s = time.perf_counter() - start_s
        if args.profile:
            await _call_profiler(session, target, "stop_profile")
    return results, duration_s


async def _call_profiler(session: ClientSession, target: LoadTarget, action: str) -> None:
    root = target.url.partition("/v1/")[0]
    async with session.post(f"{root}/{action}") as response:
        if response.status != 200:
            raise VllmError(f"the server has no /{action} (status {response.status})")


def _describe_run(args: Namespace) -> dict[str, Any]:
    rate = args.request_rate
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": args.model,
        "tokenizer_id": args.tokenizer or args.model,
        "best_of": args.best_of,
        "num_prompts": args.num_prompts,
        **args.metadata,
        "request_rate": rate if np.isfinite(rate) else "inf",
    }


def _result_path(args: Namespace) -> str:
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    model = args.model.rstrip("/").split("/")[-1]
    name = args.result_filename or f"{args.backend}-{args.request_rate}qps-{model}-{date}.json"
    return f"{args.result_dir}/{name}" if args.result_dir else name
