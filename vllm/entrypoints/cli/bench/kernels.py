"""`vllm bench kernels`: how fast each attention kernel is on this machine.

Measures one layer of each kind that a model has, or typical ones, decoding and prefilling. With
--save the engine's choice of a kernel ("auto") follows what was found.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.attention.backends.abstract import KernelQuery
from vllm.attention.measure.load import count_bytes, count_flops, list_loads
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.bench.kernels_report import draw_chart, format_shape, format_summary
from vllm.entrypoints.cli.bench.summary import write_json
from vllm.errors import ConfigError
from vllm.platforms import get_platform
from vllm.platforms.detect import find_cuda_fault, find_device
from vllm.transformers_utils.dtype import resolve_dtype
from vllm.utils.argument_parser import FlexibleArgumentParser, parse_positive

if TYPE_CHECKING:
    from vllm.attention.measure.cells import Cell
    from vllm.attention.measure.clock import MachineRates
    from vllm.attention.measured_ranks import KernelRanks

TYPICAL_HEADS = ((32, 8, 64), (32, 8, 128), (16, 8, 256))
"""Heads, KV heads and head sizes that are measured without a model."""
TYPICAL_WINDOWS = (0, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultLoads:
    """What is measured where nothing else is said: about a minute for each kind of layer."""

    batch_sizes: tuple[int, ...]
    context_lens: tuple[int, ...]
    prompt_lens: tuple[int, ...]


DEFAULTS: Mapping[str, DefaultLoads] = {
    "cpu": DefaultLoads(batch_sizes=(1, 8), context_lens=(512, 4096), prompt_lens=(128, 1024)),
    "cuda": DefaultLoads(
        batch_sizes=(1, 8, 32, 128), context_lens=(1024, 8192, 32768), prompt_lens=(512, 2048, 8192)
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredShape:
    """One kind of layer and what was found.

    Attributes:
        layers: of the model; empty for a typical shape.
        refusals: kernels that do not serve it, and why.
    """

    query: KernelQuery
    layers: tuple[int, ...]
    refusals: Mapping[str, str]
    cells: tuple[Cell, ...]


def make_parser() -> FlexibleArgumentParser:
    """Return the parser: the benchmark's options, then the engine's."""
    parser = FlexibleArgumentParser(prog="vllm bench kernels", description=__doc__)
    parser.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="measure its layers instead of typical ones"
    )
    group = parser.add_argument_group("benchmark")
    for flag, text in (
        ("--batch-sizes", "decoding sequences"),
        ("--context-lens", "tokens of each"),
        ("--prompt-lens", "tokens of a prompt, computed alone"),
    ):
        group.add_argument(flag, type=int, nargs="+", default=None, help=f"{text} (by device)")
    group.add_argument(
        "--runs", type=parse_positive, default=15, help="runs of each kernel on each load"
    )
    group.add_argument("--output-json", default=None, metavar="FILE", help="where to write results")
    group.add_argument("--output-png", default=None, metavar="FILE", help="where to draw them")
    group.add_argument(
        "--save", action="store_true", help="let the engine choose by this measurement from now on"
    )
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=None)  # nobody's default model is meant
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the measurement, print it, and write it where asked."""
    args = make_parser().parse_args(argv)
    args.model = args.model_tag or args.model
    device = find_device_type(args.device)
    _fill_loads(args, device)
    queries = read_queries(args, device)
    from vllm.attention.measured_ranks import identify_machine, save_ranks  # noqa: PLC0415  torch

    machine = identify_machine(device)
    rates = measure_rates(queries)
    shapes: list[MeasuredShape] = []
    described: list[dict[str, Any]] = []
    for shape in measure_shapes(queries, args):
        shapes.append(shape)
        described.append(describe_shape(shape, rates[shape.query.dtype.value]))
        print("\n".join([*format_shape(described[-1]), ""]), flush=True)
    ranks = rank_shapes(shapes)
    result: dict[str, Any] = {
        "model": args.model,
        **asdict(machine),
        "device": device,
        "runs": args.runs,
        "rates": {name: asdict(found) for name, found in rates.items()},
        "shapes": described,
        "ranks": [{**asdict(entry.key), "relative_times": entry.relative_times} for entry in ranks],
    }
    print("\n".join(format_summary(result)))
    if args.output_json:
        write_json(args.output_json, result)
    if args.output_png:
        draw_chart(result, Path(args.output_png))
    if args.save:
        print(f"Saved to {save_ranks(device, ranks)}")
    return 0


def find_device_type(requested: str) -> str:
    """Return "cpu" or "cuda".

    Raises:
        ConfigError: there is no such device here.
    """
    device = find_device() if requested == "auto" else requested
    get_platform(device)
    if device == "cuda" and (fault := find_cuda_fault()):
        raise ConfigError(f"device 'cuda' was asked for, but {fault}; use --device cpu, or auto")
    return device


def _fill_loads(args: argparse.Namespace, device: str) -> None:
    defaults = DEFAULTS[device]
    args.batch_sizes = args.batch_sizes or list(defaults.batch_sizes)
    args.context_lens = args.context_lens or list(defaults.context_lens)
    args.prompt_lens = args.prompt_lens or list(defaults.prompt_lens)
    for name in ("batch_sizes", "context_lens", "prompt_lens"):
        if min(given := getattr(args, name)) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be at least 1, got {given}")
    if args.runs < 1:
        raise ConfigError(f"--runs must be at least 1, got {args.runs}")


def read_queries(args: argparse.Namespace, device: str) -> dict[KernelQuery, tuple[int, ...]]:
    """Return the kinds of layers to measure, and which layers of the model are of each."""
    if args.model is None:
        return dict.fromkeys(list_typical_queries(args, device), ())
    from vllm.worker.imagined_model import read_queries as read_layers  # noqa: PLC0415  torch

    args.skip_tokenizer_init = True
    config = EngineArgs.from_cli_args(args).create_engine_config()
    args.max_model_len = config.model_config.max_model_len
    kinds: dict[KernelQuery, tuple[int, ...]] = {}
    for layer, query in read_layers(config).items():
        kinds[query] = (*kinds.get(query, ()), layer)
    if not kinds:
        raise ConfigError(f"{args.model} has no attention layers")
    return kinds


def list_typical_queries(args: argparse.Namespace, device: str) -> Iterator[KernelQuery]:
    """Yield layers as many models have them, with --dtype and --block-size."""
    dtype = resolve_dtype(args.dtype, None, device)
    for num_heads, num_kv_heads, head_size in TYPICAL_HEADS:
        for window in TYPICAL_WINDOWS:
            yield KernelQuery(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                dtype=dtype,
                kv_dtype=dtype,
                scale=head_size**-0.5,
                block_tokens=args.block_size,
                device=device,
                capability=get_platform(device).get_device_capability(),
                window=window,
            )


def measure_rates(queries: Iterable[KernelQuery]) -> dict[str, MachineRates]:
    """Return what plain torch reaches, for each element type of the layers."""
    from vllm.attention.measure.clock import measure_machine  # noqa: PLC0415  torch

    kinds = dict.fromkeys((query.device, query.dtype) for query in queries)
    return {dtype.value: measure_machine(device, dtype) for device, dtype in kinds}


def measure_shapes(
    queries: Mapping[KernelQuery, tuple[int, ...]], args: argparse.Namespace
) -> Iterator[MeasuredShape]:
    """Measure every kind of layer on every load, all kernels in turns."""
    from vllm.attention.measure import cells  # noqa: PLC0415  torch

    stated_len = max(args.max_model_len or 0, *args.context_lens)
    loads = list_loads(args.batch_sizes, args.context_lens, args.prompt_lens)
    for query, layers in queries.items():
        cells.prepare_device(query.device)
        verdicts = cells.find_refusals(query)
        kernels = [name for name, refusal in verdicts.items() if refusal is None]
        yield MeasuredShape(
            query=query,
            layers=layers,
            refusals={name: text for name, text in verdicts.items() if text is not None},
            cells=tuple(
                cells.measure_cell(query, entry, kernels, stated_len=stated_len, num_runs=args.runs)
                for entry in loads
            ),
        )


def describe_shape(shape: MeasuredShape, rates: MachineRates) -> dict[str, Any]:
    """Return one kind of layer for JSON: times, and their shares of what the machine can do."""
    return {
        "layers": list(shape.layers),
        "query": asdict(shape.query),
        "refusals": dict(shape.refusals),
        "cells": [_describe_cell(shape.query, cell, rates) for cell in shape.cells],
    }


def _describe_cell(query: KernelQuery, cell: Cell, rates: MachineRates) -> dict[str, Any]:
    num_bytes, num_flops = count_bytes(query, cell.load), count_flops(query, cell.load)
    return {
        "phase": cell.load.phase,
        "batch_size": cell.load.num_rows,
        "length": cell.load.seq_len,
        "bytes": num_bytes,
        "flops": num_flops,
        "num_layers": cell.num_layers,
        "kernels": {
            name: {
                "median_us": 1e6 * times.median_s,
                "min_us": 1e6 * times.min_s,
                "num_runs": times.num_runs,
                "is_graph": times.is_graph,
                "bytes_per_s": num_bytes / times.median_s,
                "share_of_copy": num_bytes / times.median_s / rates.copy_bytes_per_s,
                "flops_per_s": num_flops / times.median_s,
                "share_of_matmul": num_flops / times.median_s / rates.matmul_flops_per_s,
            }
            for name, times in cell.kernels.items()
        },
        "faults": dict(cell.faults),
    }


def rank_shapes(shapes: Sequence[MeasuredShape]) -> tuple[KernelRanks, ...]:
    """Rank the kernels for each head size, element type, and with a window or without."""
    from vllm.attention.measured_ranks import (  # noqa: PLC0415  torch
        CellTimes,
        RankKey,
        make_rank_key,
        rank_cells,
    )

    cells: dict[RankKey, list[CellTimes]] = {}
    for shape in shapes:
        entry = cells.setdefault(make_rank_key(shape.query), [])
        for cell in shape.cells:
            times = {name: found.median_s for name, found in cell.kernels.items()}
            if times:
                entry.append(CellTimes(phase=cell.load.phase, times=times))
    return tuple(rank_cells(key, entries) for key, entries in cells.items() if entries)
