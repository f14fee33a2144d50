"""`vllm bench hybrid`: vanilla against hybrid on the same work, with the same bytes of cache.

Both engines run in this process, one after the other, on token ids. Vanilla keeps every token in
every attention layer; states, which nothing can replace, are kept by both.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.cache_spec import Chunk, State, Window
from vllm.config import EngineConfig
from vllm.config.hybrid import HybridSettings
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.bench.hybrid_report import draw_chart, format_table
from vllm.entrypoints.cli.bench.summary import find_percentiles, write_json
from vllm.entrypoints.cli.hybrid import parse_bytes
from vllm.errors import ConfigError
from vllm.sequence import SequenceRequest
from vllm.step import RowSampling
from vllm.utils.argument_parser import FlexibleArgumentParser, parse_positive

if TYPE_CHECKING:
    from vllm.engine.core import EngineCore

RANKS = (50, 99)
_GREEDY = RowSampling(temperature=0.0)


@dataclass(slots=True)
class Load:
    """What is being measured of one batch.

    Attributes:
        first_s: request -> seconds until its first token.
        gaps_s: seconds between tokens of one request.
        lens: running request -> tokens of it so far, once it has its first.
        peak_usage: largest share of the cache that requests held.
        decoding_usage: same, while every running request was past its prompt.
        decoding_lens: lengths of the requests at that moment.
        peak_running: most requests that ran at once.
        decode_s: seconds of the steps around which every running request was past its prompt.
        num_decoded: tokens of these steps.
    """

    first_s: dict[str, float] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    lens: dict[str, int] = field(default_factory=dict)
    peak_usage: float = 0.0
    decoding_usage: float = 0.0
    decoding_lens: list[int] = field(default_factory=list)
    peak_running: int = 0
    decode_s: float = 0.0
    num_decoded: int = 0


def make_parser() -> FlexibleArgumentParser:
    """Return the parser: the benchmark's options, then the engine's."""
    parser = FlexibleArgumentParser(prog="vllm bench hybrid", description=__doc__)
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--input-len", type=parse_positive, default=512, help="tokens of each prompt"
    )
    group.add_argument(
        "--output-len", type=parse_positive, default=256, help="tokens of each answer"
    )
    group.add_argument(
        "--batch-sizes",
        type=parse_positive,
        nargs="+",
        default=[1, 4, 8, 16],
        help="requests at once",
    )
    group.add_argument(
        "--kv-bytes", type=parse_bytes, default=None, help="cache of both engines (as served)"
    )
    group.add_argument("--output-json", default=None, metavar="FILE", help="where to write results")
    group.add_argument("--output-png", default=None, metavar="FILE", help="where to draw them")
    return EngineArgs.add_cli_args(parser)


def main(argv: Sequence[str]) -> int:
    """Run the measurement, print it, and write it where asked."""
    args = make_parser().parse_args(argv)
    args.model = args.model_tag or args.model
    args.hybrid_mode = True
    args.skip_tokenizer_init = True
    config = EngineArgs.from_cli_args(args).create_engine_config()
    _check_args(args, config)
    cache = replace(config.cache_config, cache_bytes=args.kv_bytes)
    hybrid = replace(config, cache_config=cache)
    vanilla = replace(hybrid, hybrid=HybridSettings(trace_level=config.hybrid.trace_level))
    result: dict[str, Any] = {
        "model": args.model,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "max_model_len": config.model_config.max_model_len,
        "dtype": config.model_config.dtype.value,
        "vanilla": measure(vanilla, config.hybrid, args),
        "hybrid": measure(hybrid, config.hybrid, args),
    }
    print("\n".join(format_table(result)))
    if args.output_json:
        write_json(args.output_json, result)
    if args.output_png:
        draw_chart(result, Path(args.output_png))
    return 0


def _check_args(args: argparse.Namespace, config: EngineConfig) -> None:
    most = config.model_config.max_model_len
    if args.input_len < 1 or args.output_len < 1 or args.input_len + args.output_len > most:
        raise ConfigError(
            f"--input-len {args.input_len} and --output-len {args.output_len} must be at least 1 "
            f"and together at most max_model_len ({most})"
        )
    if min(args.batch_sizes) < 1:
        raise ConfigError(f"--batch-sizes must be at least 1, got {args.batch_sizes}")


def measure(
    config: EngineConfig, policies: HybridSettings, args: argparse.Namespace
) -> dict[str, Any]:
    """Start an engine, run every batch on it, and return what was found.

    Args:
        config: of the engine.
        policies: of the hybrid engine: which rows a later step can read.
        args: of the command.
    """
    from vllm.engine.core import EngineCore  # noqa: PLC0415  --help needs no engine
    from vllm.executor import make_executor  # noqa: PLC0415

    executor = make_executor(config)
    token_bytes = {s.layer: s.token_bytes for s in executor.reports()[0].cache_specs}
    engine = EngineCore(config, executor)
    try:
        batches = {}
        run_batch(engine, config, 1, args.input_len, 2)  # first use of every op
        for number, size in enumerate(args.batch_sizes):
            before = engine.stats().num_preemptions
            start_s = time.perf_counter()
            load = run_batch(engine, config, size, args.input_len, args.output_len, number)
            elapsed_s = time.perf_counter() - start_s
            batches[str(size)] = {
                **describe_load(load, size * args.output_len, elapsed_s),
                "num_preemptions": engine.stats().num_preemptions - before,
                "kv_held_bytes": int(load.peak_usage * engine.ready.cache_bytes),
                "kv_unreadable_share": find_unreadable(
                    load, policies, token_bytes, load.decoding_usage * engine.ready.cache_bytes
                ),
            }
        startup = engine.ready.startup
        return {
            "weight_bytes": engine.ready.weight_bytes,
            "cache_bytes": engine.ready.cache_bytes,
            "max_concurrency": startup["max_concurrency"],
            "bytes_per_sequence": startup["bytes_per_sequence"],
            "groups": [group.name for group in engine.ready.groups],
            "batches": batches,
        }
    finally:
        engine.shutdown()
        del engine, executor
        gc.collect()  # the next engine needs the memory


def run_batch(
    engine: EngineCore,
    config: EngineConfig,
    size: int,
    input_len: int,
    output_len: int,
    seed: int = 0,
) -> Load:
    """Run `size` requests at once, all of other random tokens, and watch every step."""
    rng = np.random.default_rng(seed + 1000 * size)
    most = min(config.model_config.vocab_size, 10_000)
    load = Load()
    for number in range(size):
        engine.scheduler.add(
            SequenceRequest(
                request_id=f"{size}-{seed}-{number}",
                prompt_token_ids=rng.integers(10, most, input_len).tolist(),
                sampling=_GREEDY,
                max_tokens=output_len,
            )
        )
    start_s = time.perf_counter()
    last_s: dict[str, float] = {}
    stepped_s, was_decoding = start_s, False
    while engine.has_work:
        results = engine.step()
        now_s = time.perf_counter()
        stats = engine.stats()
        num_answered = len(load.first_s)
        for result in results:
            if not result.token_ids:
                continue
            name = result.request_id
            if name in last_s:
                load.gaps_s.append(now_s - last_s[name])
            load.first_s.setdefault(name, now_s - start_s)
            last_s[name] = now_s
            load.lens[name] = load.lens.get(name, input_len) + len(result.token_ids)
            if result.finish_reason is not None:
                del load.lens[name]
        load.peak_running = max(load.peak_running, stats.num_running)
        load.peak_usage = max(load.peak_usage, stats.cache_usage)
        is_decoding = len(load.lens) == stats.num_running
        if was_decoding and len(load.first_s) == num_answered:
            load.decode_s += now_s - stepped_s
            load.num_decoded += sum(len(result.token_ids) for result in results)
        stepped_s, was_decoding = now_s, is_decoding
        if is_decoding and stats.cache_usage >= load.decoding_usage:
            load.decoding_usage = stats.cache_usage
            load.decoding_lens = list(load.lens.values())
    return load


def describe_load(load: Load, num_tokens: int, elapsed_s: float) -> dict[str, float]:
    """Return throughput and latencies of one batch."""
    gaps_ms = {r: 1000 * v for r, v in find_percentiles(load.gaps_s, RANKS).items()}
    first_ms = {
        r: 1000 * v for r, v in find_percentiles(list(load.first_s.values()), RANKS).items()
    }
    return {
        "elapsed_s": elapsed_s,
        "tokens_per_s": num_tokens / elapsed_s,
        "decode_tokens_per_s": load.num_decoded / load.decode_s if load.decode_s else 0.0,
        "peak_running": load.peak_running,
        **{f"p{rank}_token_ms": value for rank, value in gaps_ms.items()},
        **{f"p{rank}_first_token_ms": value for rank, value in first_ms.items()},
    }


def find_unreadable(
    load: Load, policies: HybridSettings, token_bytes: Mapping[int, int], held_bytes: float
) -> float:
    """Return the share of the held bytes that no later step can read: dead rows, unfilled blocks.

    States are left out on both sides: they are the same in every engine.
    """
    readable = 0
    for policy in policies.policies or ():
        per_token = token_bytes.get(policy.layer, 0)
        for length in load.decoding_lens:
            match policy.lifetime:
                case Window(tokens=tokens, sinks=sinks):
                    rows = min(length, tokens + sinks)
                case Chunk(tokens=tokens):
                    rows = length % tokens
                case State():
                    rows = 0
                case _:
                    rows = length
            readable += per_token * rows
    return max(0.0, 1.0 - readable / held_bytes) if held_bytes else 0.0
