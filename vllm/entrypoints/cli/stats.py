"""`vllm stats`: one look at a running server, as a table or as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from vllm.entrypoints.cli.http_client import DEFAULT_URL, ApiClient
from vllm.utils.argument_parser import FlexibleArgumentParser

_CLEAR_SCREEN = "\033[2J\033[H"


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = FlexibleArgumentParser(
        prog="vllm stats", description="Show requests, blocks and kernels of a running server."
    )
    parser.add_argument("--url", default=DEFAULT_URL, help="base URL of the server's OpenAI API")
    parser.add_argument("--api-key", default=None, help="bearer token; OPENAI_API_KEY if unset")
    parser.add_argument("--json", action="store_true", help="print the server's JSON")
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=2.0,
        default=None,
        metavar="SECONDS",
        help="repeat until Ctrl-C, every 2 seconds or as given",
    )
    args = parser.parse_args(argv)
    client = ApiClient(args.url, args.api_key, timeout_s=10)
    try:
        while True:
            stats = client.get_from_root("/stats")
            text = json.dumps(stats, indent=2) if args.json else "\n".join(format_stats(stats))
            print(_CLEAR_SCREEN * (args.watch is not None and not args.json) + text, flush=True)
            if args.watch is None:
                return 0
            time.sleep(args.watch)
    except KeyboardInterrupt:
        return 0


def format_stats(stats: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table; fields that are not known here are shown as they are."""
    nested = {name: value for name, value in stats.items() if isinstance(value, dict)}
    width = max(len(name) for name in stats)
    for name, value in stats.items():
        if name not in nested:
            yield f"{name:<{width}}  {_format_value(value)}"
    groups = nested.pop("blocks_by_group", {})
    if groups:
        columns = list(next(iter(groups.values())))
        yield ""
        yield f"{'group':<16}" + "".join(f"{column:>12}" for column in columns)
        for group, counts in groups.items():
            yield f"{group:<16}" + "".join(f"{counts.get(c, 0):>12}" for c in columns)
    kernels = nested.pop("kernels", {})
    if kernels:
        yield ""
        yield "layers          kernel"
        yield from _format_kernels(kernels)
    for name, value in nested.items():
        yield ""
        yield f"{name}:"
        if _is_table(value):
            yield from _format_rows(value)
            continue
        tables = {key: inner for key, inner in value.items() if _is_table(inner)}
        for key, inner in value.items():
            if key not in tables:
                yield f"  {key:<{width}}  {_format_value(inner)}"
        for key, inner in tables.items():
            yield f"  {key}:"
            yield from _format_rows(inner)


def _is_table(value: object) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(row, dict) for row in value.values())
    )


def _format_rows(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table with one line for each entry; columns are as wide as what stands in them."""
    columns = list(next(iter(rows.values())))
    lines = [["", *columns]]
    lines += [[key, *(_format_value(row.get(c, "")) for c in columns)] for key, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  " + "  ".join(f"{x:<{w}}" for x, w in zip(line, widths, strict=True)).rstrip()


def _format_kernels(kernels: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield one line for each run of layers that are served alike."""
    layers = sorted(kernels, key=int)
    for (kernel, note), run in groupby(
        layers, key=lambda i: (kernels[i].get("kernel", ""), kernels[i].get("note", ""))
    ):
        members = list(run)
        name = members[0] if len(members) == 1 else f"{members[0]}-{members[-1]}"
        yield f"{name:<16}{kernel}" + (f"  ({note})" if note else "")


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and len(value) > 1 and all(type(item) is int for item in value):
        return _format_ranges(value)
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def _format_ranges(numbers: Sequence[int]) -> str:
    """Write [0, 1, 2, 5] as "0-2,5"."""
    parts: list[str] = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return ",".join(parts)
