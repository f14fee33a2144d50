"""`vllm complete`: let a running server go on with texts typed in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.entrypoints.cli.terminal import make_parser, print_pieces, read_lines, start_session


def main(argv: Sequence[str]) -> int:
    """Run `vllm complete`: every line is a text to go on with."""
    parser = make_parser("vllm complete", "Let a running server complete texts.")
    client, fields = start_session(parser.parse_args(argv))
    for line in read_lines("Please enter prompt to complete:"):
        events = client.stream("/completions", {**fields, "prompt": line})
        print_pieces(choice["text"] for event in events for choice in event["choices"])
    return 0
