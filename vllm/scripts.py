"""The `vllm` command: finds the sub-command and runs it.

Each sub-command lives in a module of its own under `entrypoints/cli`, loaded only when asked for,
so that `vllm --help` is quick.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from vllm.errors import VllmError
from vllm.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A sub-command.

    Attributes:
        target: "module:function"; the function takes the arguments and returns the exit status.
    """

    target: str
    help: str


_CLI = "vllm.entrypoints.cli"

COMMANDS = {
    "serve": Command(target=f"{_CLI}.serve:main", help="serve a model over HTTP"),
    "chat": Command(target=f"{_CLI}.chat:main", help="chat with a running server"),
    "complete": Command(target=f"{_CLI}.complete:main", help="let a running server complete texts"),
    "stats": Command(
        target=f"{_CLI}.stats:main", help="requests, blocks and kernels of a running server"
    ),
    "bench": Command(
        target=f"{_CLI}.bench:main", help="measure latency, throughput or a running server"
    ),
    "hybrid": Command(
        target=f"{_CLI}.hybrid:main", help="what the layers of a model keep, and what fits"
    ),
    "collect-env": Command(
        target=f"{_CLI}.collect_env:main", help="check drivers, libraries and compiled ops"
    ),
}


def format_help() -> str:
    """Return the text of `vllm --help`."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: vllm COMMAND [options]",
            "",
            f"vllm-hybrid {__version__}, an LLM inference engine",
            "",
            "commands:",
            *lines,
            "",
            "`vllm COMMAND --help` shows the options of a command.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(format_help())
        return 0 if args else 2
    name = args[0]
    if name in ("-v", "--version", "version"):
        print(__version__)
        return 0
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `vllm {near[0]}`?" if near else "see vllm --help"
        print(f"vllm: error: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    module, _, function = command.target.partition(":")
    try:
        status: int = getattr(import_module(module), function)(args[1:])
        return status
    except VllmError as cause:
        print(f"vllm {name}: error: {cause}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has gone
        return 141


if __name__ == "__main__":
    sys.exit(main())
