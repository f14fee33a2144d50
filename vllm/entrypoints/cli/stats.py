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
        for key, inner in value.items():
            yield f"  {key:<{width}}  {_format_value(inner)}"


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
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)
