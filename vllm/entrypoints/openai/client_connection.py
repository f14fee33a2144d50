"""Knowing that the client has gone, whatever stands between it and the handler.

`ClientConnection` is the outermost ASGI layer. It alone listens for the disconnect, once the body
has been read, and tells the handler through an event in the scope, which every middleware passes
on. So a middleware that hides `http.disconnect` (any function-style one does) cannot keep a
request alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, MutableMapping
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.openai.errors import ClientDisconnected

_EVENT = "vllm.client_gone"

T = TypeVar("T")


class ClientConnection:
    """The ASGI layer that watches one connection for each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request with a watched `receive`."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        watch = _Watch(receive)
        scope[_EVENT] = watch.gone
        try:
            await self._app(scope, watch.receive, send)
        finally:
            watch.stop()


class _Watch:
    """Passes the body on, then waits for the disconnect."""

    def __init__(self, receive: Receive) -> None:
        self.gone = asyncio.Event()
        self._receive = receive
        self._listener: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        """The `receive` that the application gets."""
        if self._listener is not None:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone.set()
        elif not message.get("more_body", False):
            self._listener = asyncio.create_task(self._listen())
        return message

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    def stop(self) -> None:
        """End the listener; the request is over."""
        if self._listener is not None:
            self._listener.cancel()


async def run_while_connected(scope: MutableMapping[str, Any], work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result; cancel it when the client goes away.

    Raises:
        ClientDisconnected: the client went first; `work` has ended.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(scope[_EVENT].wait())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        gone.cancel()
        await _end(task)


async def _end(task: Awaitable[Any]) -> None:
    future = asyncio.ensure_future(task)
    if not future.done():
        future.cancel()
        await asyncio.wait((future,))
