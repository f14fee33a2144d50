"""Superblock geometry: the smallest size within the limits, else the least loss."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.core.block.geometry import plan_superblocks, tail_waste
from vllm.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def kv_bytes(layers: int, kv_heads: int, head_size: int, tokens: int = 16) -> int:
    return layers * kv_heads * head_size * 2 * 2 * tokens


# Blocks of 16 tokens (bfloat16) over all layers of a lifetime, and whole states.
SHAPES = {
    "gemma3-4b": [kv_bytes(5, 4, 256), kv_bytes(29, 4, 256)],
    "gemma3-27b": [kv_bytes(10, 16, 128), kv_bytes(52, 16, 128)],
    "qwen2-hybrid": [kv_bytes(16, 8, 128), kv_bytes(16, 8, 128)],
    "gpt-oss-20b": [kv_bytes(12, 8, 64), kv_bytes(12, 8, 64)],
    "qwen3-next-small": [kv_bytes(6, 2, 256), 18 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)],
    "qwen3.5-35b": [kv_bytes(10, 2, 256), 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)],
    "lfm2-1.2b": [kv_bytes(6, 8, 64), 10 * 2048 * 2 * 2],
}


@pytest.mark.parametrize("name", SHAPES)
def test_real_shapes_waste_at_most_two_percent(name):
    sizes = [-(-size // 256) * 256 for size in SHAPES[name]]
    geometry = plan_superblocks(sizes, 16 * GIB)
    assert geometry.within_limits
    assert max(geometry.waste) <= 0.02
    assert geometry.superblock_bytes <= 64 * MIB


def test_one_group_has_one_block_in_a_superblock():
    geometry = plan_superblocks([368 * KIB], GIB)
    assert geometry.superblock_bytes == 368 * KIB
    assert geometry.blocks_per_superblock == (1,)
    assert geometry.waste == (0.0,)


units = st.integers(1, 400)


@settings(max_examples=200, deadline=None)
@given(st.lists(units, min_size=1, max_size=4), st.integers(1, 60_000))
def test_smallest_within_limits_or_least_loss(sizes, arena):
    sizes = [256 * size for size in sizes]
    arena *= 256
    limits = {"max_superblock_bytes": 256 * 2000, "min_superblocks": 16, "max_waste": 0.02}
    largest = max(sizes)
    if largest > arena:
        with pytest.raises(ConfigError, match="cache block has"):
            plan_superblocks(sizes, arena, **limits)
        return
    geometry = plan_superblocks(sizes, arena, **limits)
    size = geometry.superblock_bytes
    assert size % largest == 0
    assert size <= arena
    for small, per, waste in zip(
        sizes, geometry.blocks_per_superblock, geometry.waste, strict=True
    ):
        assert per * small <= size < (per + 1) * small
        assert waste == pytest.approx(1 - per * small / size)

    def is_good(candidate: int) -> bool:
        return (
            candidate <= 256 * 2000
            and candidate * 16 <= arena
            and max(tail_waste(candidate, small) for small in sizes) <= 0.02
        )

    good = [c for c in range(largest, arena + 1, largest) if is_good(c)]
    assert geometry.within_limits == bool(good)
    if good:
        assert size == good[0]
    else:
        loss = max(geometry.waste) + len(sizes) * size / (2 * arena)
        alone = max(tail_waste(largest, small) for small in sizes)
        assert loss <= alone + len(sizes) * largest / (2 * arena) + 1e-12


def test_unaligned_blocks_are_refused():
    with pytest.raises(ConfigError, match="multiples of 256"):
        plan_superblocks([1000], MIB)
