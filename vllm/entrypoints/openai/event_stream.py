"""Server-sent events as an ASGI response.

A serving class hands over an iterator of encoded events; the first is made before the status is
sent, so that a request that the engine refuses is answered with a proper status. Later errors
become an error event. The iterator is always closed, which aborts what still runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.openai.client_connection import run_while_connected
from vllm.entrypoints.openai.errors import (
    ClientDisconnected,
    api_error,
    error_body,
    log_server_error,
)
from vllm.entrypoints.openai.response import STREAM_END, encode_event

EventGenerator = AsyncGenerator[bytes, None]


class EventStream(Response):
    """Sends events as they come."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: EventGenerator) -> None:
        """Take over an iterator whose first event is already made; see `open_stream`."""
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop and abort when the client goes away."""
        with contextlib.suppress(ClientDisconnected):
            await run_while_connected(scope, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events):
            await _send_body(send, self._first)
            try:
                async for event in self._events:
                    await _send_body(send, event)
            except Exception as cause:
                await _send_body(send, _error_event(cause))
            await send({"type": "http.response.body", "body": STREAM_END, "more_body": False})


async def open_stream(events: EventGenerator) -> EventStream:
    """Wait for the first event and return the response.

    Raises: whatever the iterator raises before its first event; it is closed then.
    """
    try:
        first = await anext(events, b"")
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)


async def _send_body(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _error_event(cause: Exception) -> bytes:
    error = api_error(cause)
    log_server_error(error, cause)
    return encode_event(error_body(error))
