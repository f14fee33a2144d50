"""Several async generators read as one.

Used where one HTTP request runs several engine requests. Order is kept within a generator only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merge_streams(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the generator, item) as items come; close all when closed or when one fails.

    Raises: whatever the first failing generator raises.
    """
    if len(streams) == 1:  # the usual case needs no tasks
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(len(streams))
    tasks = [asyncio.create_task(_pump(i, s, queue)) for i, s in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            got = await queue.get()
            if got is None:
                running -= 1
            elif isinstance(got, BaseException):
                raise got
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int,
    stream: AsyncGenerator[T, None],
    queue: asyncio.Queue[tuple[int, T] | BaseException | None],
) -> None:
    try:
        async with contextlib.aclosing(stream):
            async for item in stream:
                await queue.put((index, item))
    except Exception as cause:
        await queue.put(cause)
    else:
        await queue.put(None)
