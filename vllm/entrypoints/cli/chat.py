"""`vllm chat`: a conversation with a running server, in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.entrypoints.cli.terminal import make_parser, print_pieces, read_lines, start_session


def main(argv: Sequence[str]) -> int:
    """Run `vllm chat`: a conversation; the whole of it goes with every request."""
    parser = make_parser("vllm chat", "Chat with a running server.")
    parser.add_argument("--system-prompt", default=None, help="instruction before the first turn")
    args = parser.parse_args(argv)
    client, fields = start_session(args)
    conversation: list[dict[str, str]] = []
    if args.system_prompt:
        conversation.append({"role": "system", "content": args.system_prompt})
    for line in read_lines("Please enter a message for the chat model:"):
        conversation.append({"role": "user", "content": line})
        events = client.stream("/chat/completions", {**fields, "messages": conversation})
        answer = print_pieces(
            choice["delta"].get("content") or "" for event in events for choice in event["choices"]
        )
        conversation.append({"role": "assistant", "content": answer})
    return 0
