"""A client that goes away: whatever wraps the request, it is aborted within two seconds (C49)."""

from __future__ import annotations

import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request

LOOP = [65] * 400


async def do_nothing(request: Request, call_next: Any) -> Any:
    """A middleware as users write them."""
    return await call_next(request)


async def read_body(request: Request, call_next: Any) -> Any:
    """A middleware that looks at the body first."""
    await request.body()
    return await call_next(request)


class DoNothing(BaseHTTPMiddleware):
    """The same as a class."""

    async def dispatch(self, request: Request, call_next: Any) -> Any:
        return await call_next(request)


_HERE = __name__
GUARDS = {
    "nothing": {},
    "function": {"middleware": [f"{_HERE}.do_nothing"]},
    "body reader": {"middleware": [f"{_HERE}.read_body"]},
    "class": {"middleware": [f"{_HERE}.DoNothing"]},
    "key": {"api_key": "secret"},
    "key and function": {"api_key": "secret", "middleware": [f"{_HERE}.do_nothing"]},
}


def send_request(url: str, path: str, body: dict[str, Any]) -> socket.socket:
    """Send one request over a raw socket."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=5)
    payload = json.dumps({"model": "chain", **body}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    connection.sendall(head.encode() + payload)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("guard", GUARDS)
def test_disconnect_aborts(serve: Any, guard: str, stream: bool) -> None:
    client = serve(LOOP, delay_s=0.02, flags=GUARDS[guard])
    bodies = {
        "/v1/completions": {"prompt": ["A", "B"]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "A"}]},
    }
    limits = {"max_tokens": 400, "stream": stream}
    open_sockets = [send_request(client.url, p, {**b, **limits}) for p, b in bodies.items()]
    deadline = time.monotonic() + 5
    while len(client.engine.running) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(client.engine.running) == 3
    time.sleep(0.1)
    for connection in open_sockets:
        connection.close()
    closed_at = time.monotonic()
    while client.engine.running and time.monotonic() < closed_at + 2:
        time.sleep(0.01)
    assert not client.engine.running, "the request still runs two seconds after the close"
    assert len(client.engine.aborted) == 3
    reply = client.http.get("/health")
    assert reply.status_code == 200


def test_stream_keeps_working_through_middleware(serve: Any) -> None:
    for guard in ("function", "body reader", "class"):
        client = serve("hello DEF", flags=GUARDS[guard])
        events = client.stream("/v1/completions", prompt="A")
        assert "".join(e["choices"][0]["text"] for e in events) == "hello DEF"


def test_one_prompt_that_fails_ends_the_others(serve: Any) -> None:
    client = serve(LOOP, delay_s=0.02)
    reply = client.post("/v1/completions", prompt=[[65], [320]], max_tokens=400)
    assert reply.status_code == 400
    assert not client.engine.running
