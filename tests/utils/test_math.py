"""Arithmetic on sizes."""

from __future__ import annotations

import pytest

from vllm.utils.math import cdiv, next_power


@pytest.mark.parametrize("size", [1, 3, 16])
def test_pieces_cover_a_count(size: int) -> None:
    for count in range(40):
        assert (cdiv(count, size) - 1) * size < count <= cdiv(count, size) * size


def test_the_next_power_of_two() -> None:
    assert [next_power(n) for n in (1, 2, 3, 4, 5, 127, 128, 129)] == [1, 2, 4, 4, 8, 128, 128, 256]
