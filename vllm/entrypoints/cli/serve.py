"""`vllm serve`: reads the flags and hands them to the launcher."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vllm.engine.arg_utils import DEFAULT_MODEL, AsyncEngineArgs
from vllm.entrypoints.openai.server_args import (
    ServerArgs,
    add_refused_args,
    add_server_args,
)
from vllm.errors import ConfigError, VllmError
from vllm.utils.argument_parser import FlexibleArgumentParser


def make_parser(prog: str) -> FlexibleArgumentParser:
    """Return the parser with the flags of the server and of the engine, in groups."""
    parser = FlexibleArgumentParser(
        prog=prog,
        usage=f"{prog} [MODEL] [options]",
        description="Serve a model over an HTTP API that OpenAI clients understand.",
        epilog="Underscores and dashes in flag names are the same. Flags win over --config.",
    )
    parser.add_argument(
        "model_tag", nargs="?", default=None, metavar="MODEL", help="the same as --model"
    )
    parser.add_argument(
        "--config", default="", metavar="FILE", help="YAML file of flag: value lines"
    )
    add_server_args(parser)
    AsyncEngineArgs.add_cli_args(parser)
    add_refused_args(parser)
    return parser


def choose_model(args: argparse.Namespace) -> str:
    """Return the model given as the positional or as --model.

    Raises:
        ConfigError: none is given, or two different ones.
    """
    tag, flag = args.model_tag, None if args.model == DEFAULT_MODEL else args.model
    if tag and flag and tag != flag:
        raise ConfigError(f"two models are given: {tag!r} and --model {flag!r}; give one")
    if not (tag or flag):
        raise ConfigError("no model is given: name a directory, a GGUF file or a hub id")
    return str(tag or flag)


def main(argv: Sequence[str], prog: str = "vllm serve") -> int:
    """Run the command; returns the exit status."""
    try:
        args = make_parser(prog).parse_args(argv)
    except ValueError as cause:  # a file of flags that cannot be used
        raise ConfigError(str(cause)) from cause
    args.model = choose_model(args)
    server_args = ServerArgs.from_namespace(args)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    # The web framework takes a second to import: flags are checked before that.
    from vllm.entrypoints.launcher import launch_server  # noqa: PLC0415

    return launch_server(engine_args, server_args)


def serve_module() -> int:
    """Run `python -m vllm.entrypoints.openai.api_server`."""
    try:
        return main(sys.argv[1:], prog="python -m vllm.entrypoints.openai.api_server")
    except VllmError as cause:
        print(f"api_server: error: {cause}", file=sys.stderr)
        return 1
