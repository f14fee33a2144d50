"""Several async generators read as one: order, errors, closing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from vllm.utils.merged_stream import merge_streams


class Source:
    """A generator that notes how it ended."""

    def __init__(self, items: list[int], delay_s: float = 0.0, fails: bool = False) -> None:
        self.items = items
        self.delay_s = delay_s
        self.fails = fails
        self.is_closed = False

    async def run(self) -> AsyncGenerator[int, None]:
        """Yield the items, then fail or end."""
        try:
            for item in self.items:
                await asyncio.sleep(self.delay_s)
                yield item
            if self.fails:
                raise ValueError("broken")
        finally:
            self.is_closed = True


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_every_item_comes_in_order(count: int) -> None:
    sources = [Source(list(range(i, i + 20)), delay_s=0.0001 * i) for i in range(count)]
    seen: dict[int, list[int]] = {i: [] for i in range(count)}
    async for index, item in merge_streams([s.run() for s in sources]):
        seen[index].append(item)
    assert seen == {i: s.items for i, s in enumerate(sources)}
    assert all(s.is_closed for s in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_an_error_ends_all(count: int) -> None:
    sources = [Source([1], fails=True)]
    sources += [Source(list(range(1000)), delay_s=0.01) for _ in range(count - 1)]
    with pytest.raises(ValueError, match="broken"):
        async for _ in merge_streams([s.run() for s in sources]):
            pass
    assert all(s.is_closed for s in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_closes_all(count: int) -> None:
    sources = [Source(list(range(1000)), delay_s=0.001) for _ in range(count)]
    async with contextlib.aclosing(merge_streams([s.run() for s in sources])) as merged:
        async for _ in merged:
            break
    assert all(s.is_closed for s in sources)


async def test_cancelling_closes_all() -> None:
    sources = [Source(list(range(1000)), delay_s=0.001) for _ in range(3)]

    async def consume() -> None:
        async for _ in merge_streams([s.run() for s in sources]):
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.01)
    assert all(s.is_closed for s in sources)
