"""Arithmetic on sizes."""

from __future__ import annotations


def cdiv(count: int, size: int) -> int:
    """Return how many pieces of `size` cover `count`."""
    return -(-count // size)


def next_power(count: int) -> int:
    """Return the least power of two that is not less than `count`, which is positive."""
    return 1 << (count - 1).bit_length()
