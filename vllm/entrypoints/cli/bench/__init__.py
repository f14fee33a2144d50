"""`vllm bench` and `vllm-bench`: one module for each kind of measurement, loaded when asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from vllm.errors import VllmError

KINDS = {
    "latency": "time of one batch, offline",
    "throughput": "requests and tokens per second of many requests, offline",
    "serve": "latencies and throughput of a running server under a given load",
    "kernels": "attention kernels of this machine, and which one auto takes",
    "hybrid": "vanilla against hybrid: memory, capacity, throughput, latencies, offline",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `vllm bench KIND …`; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] not in KINDS:
        is_help = bool(args) and args[0] in ("-h", "--help")
        lines = [f"  {name:<12}{text}" for name, text in KINDS.items()]
        text = "\n".join(["usage: vllm bench KIND [options]", "", "kinds:", *lines])
        if args and not is_help:
            text = f"vllm bench: error: unknown kind {args[0]!r}\n{text}"
        print(text, file=sys.stdout if is_help else sys.stderr)
        return 0 if is_help else 2
    module = import_module(f"{__name__}.{args[0]}")
    try:
        status: int = module.main(args[1:])
        return status
    except VllmError as cause:
        print(f"vllm bench {args[0]}: error: {cause}", file=sys.stderr)
        return 1
