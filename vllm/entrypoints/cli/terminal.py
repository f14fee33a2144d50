"""What `vllm complete` and `vllm chat` share: options, the model's name, reading and printing."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from vllm.entrypoints.cli.http_client import DEFAULT_URL, ApiClient
from vllm.utils.argument_parser import FlexibleArgumentParser

_PROMPT = "> "


def make_parser(prog: str, description: str) -> FlexibleArgumentParser:
    """Return a parser with the options of both commands."""
    parser = FlexibleArgumentParser(prog=prog, description=description)
    parser.add_argument("--url", default=DEFAULT_URL, help="base URL of the server's OpenAI API")
    parser.add_argument("--model-name", default=None, help="model to use; the first one if unset")
    parser.add_argument("--api-key", default=None, help="bearer token; OPENAI_API_KEY if unset")
    parser.add_argument("--max-tokens", type=int, default=None, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=None, help="0 is the likeliest token")
    return parser


def _leave(_signal: int, _frame: object) -> NoReturn:
    print()
    raise SystemExit(0)


def start_session(args: Any) -> tuple[ApiClient, dict[str, Any]]:
    """Print the model; return a client and the fields that every request carries."""
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTSTP, _leave)
    client = ApiClient(args.url, args.api_key)
    model = args.model_name or client.get("/models")["data"][0]["id"]
    print(f"Using model: {model}", flush=True)
    fields = {"model": model, "max_tokens": args.max_tokens, "temperature": args.temperature}
    return client, {name: value for name, value in fields.items() if value is not None}


def read_lines(question: str) -> Iterator[str]:
    """Yield what the user types, line by line, until end of file."""
    print(question, flush=True)
    while True:
        try:
            line = input(_PROMPT)
        except EOFError:
            print()
            return
        if line.strip():
            yield line


def print_pieces(pieces: Iterator[str]) -> str:
    """Print pieces as they come; returns all of them."""
    text = ""
    for piece in pieces:
        text += piece
        sys.stdout.write(piece)
        sys.stdout.flush()
    print(flush=True)
    return text
