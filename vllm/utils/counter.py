"""A counter."""

from __future__ import annotations


class Counter:
    """Counts up from a start; `next(counter)` returns the count and adds one."""

    def __init__(self, start: int = 0) -> None:
        """Start at `start`."""
        self.counter = start

    def __next__(self) -> int:
        value = self.counter
        self.counter += 1
        return value

    def reset(self) -> None:
        """Start at 0 again."""
        self.counter = 0
