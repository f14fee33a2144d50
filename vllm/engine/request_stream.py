"""The outputs of one request on their way to its consumer. Lives on one event loop."""

from __future__ import annotations

import asyncio
from collections import deque

from vllm.outputs import RequestOutput


class RequestStream:
    """An asynchronous iterator over a request's outputs.

    Attributes:
        request_id: of the request.
        is_finished: whether the last output, or an error, has been put in.
    """

    __slots__ = ("_items", "_waiter", "is_finished", "request_id")

    def __init__(self, request_id: str) -> None:
        """Start empty."""
        self.request_id = request_id
        self.is_finished = False
        self._items: deque[RequestOutput | BaseException] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: RequestOutput | BaseException) -> None:
        """Add an output, or the error that ends the stream; ignored behind the last item."""
        if self.is_finished:
            return
        self.is_finished = isinstance(item, BaseException) or item.finished
        self._items.append(item)
        self._wake()

    def close(self) -> None:
        """End the stream behind what is in it."""
        self.is_finished = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._items:
            if self.is_finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._items.popleft()
        if isinstance(item, BaseException):
            raise item
        return item
