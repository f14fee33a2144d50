"""A bare HTTP client on asyncio streams: cheap enough to share two cores with the server it loads.

One connection for each request, so that closing it early is a disconnect as clients make it.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class Reply:
    """What came back.

    Attributes:
        status: HTTP status, 0 if the connection broke before one came.
        events_s: when each event of a stream came, in seconds after the request was sent.
        is_whole: whether the body came to its end (for a stream, [DONE]).
        was_cut: whether this side closed early, on purpose.
    """

    status: int = 0
    body: bytes = b""
    events_s: list[float] = field(default_factory=list)
    is_whole: bool = False
    was_cut: bool = False

    @property
    def error_text(self) -> str:
        """The beginning of the body, for reports."""
        return self.body[:300].decode(errors="replace")


class RawClient:
    """Sends requests to one server on this machine."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self.model = model

    async def get(self, path: str) -> Any:
        """Return the JSON body of a GET."""
        reply = await self._exchange(f"GET {path} HTTP/1.1", b"", None)
        return json.loads(reply.body)

    async def post(
        self, path: str, body: dict[str, Any] | bytes, *, cut_after: int | None = None
    ) -> Reply:
        """POST a JSON body, or bytes as they are.

        Args:
            path: of the endpoint.
            body: the model is filled in where it is missing.
            cut_after: close the connection after so many events; 0 closes after a moment.
        """
        data = (
            body if isinstance(body, bytes) else json.dumps({"model": self.model, **body}).encode()
        )
        return await self._exchange(f"POST {path} HTTP/1.1", data, cut_after)

    async def _exchange(self, first_line: str, data: bytes, cut_after: int | None) -> Reply:
        reply = Reply()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            head = (
                f"{first_line}\r\nHost: localhost\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            )
            start_s = time.perf_counter()
            writer.write(head.encode() + data)
            if cut_after == 0:
                await asyncio.sleep(0.05)
                reply.was_cut = True
                return reply
            await self._read(reader, reply, start_s, cut_after)
        except (ConnectionError, asyncio.IncompleteReadError) as cause:
            reply.body += repr(cause).encode()
        finally:
            writer.close()
        return reply

    async def _read(
        self, reader: asyncio.StreamReader, reply: Reply, start_s: float, cut_after: int | None
    ) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        reply.status = int(head.split(b" ", 2)[1])
        is_stream = b"text/event-stream" in head
        is_chunked = b"chunked" in head.lower()
        while data := await reader.read(1 << 16):
            now_s = time.perf_counter() - start_s
            if is_stream:
                reply.events_s += [now_s] * data.count(b"data: {")
                reply.is_whole = reply.is_whole or b"data: [DONE]" in data
                if b'"error"' in data:
                    reply.body += data
                if cut_after is not None and len(reply.events_s) >= cut_after:
                    reply.was_cut = True
                    return
            else:
                reply.body += data
        if not is_stream:
            reply.is_whole = not is_chunked or reply.body.endswith(b"0\r\n\r\n")
