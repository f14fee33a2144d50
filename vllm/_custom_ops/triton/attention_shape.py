"""Which tile sizes an attention launch takes, and how many splits: arithmetic on shapes.

Called by `attention_decode.py` and `attention_prefill.py` on the host. Knows no tensor, only sizes
and the device; nothing is tuned at run time. Tiles fit the shared memory of an sm_80 (163 KiB a
block) or an sm_90 (227 KiB): a stage holds one K and one V tile beside the query tile. For GPUs
with less they are cut.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from vllm._custom_ops.triton.device import (
    count_processors,
    find_shared_bytes,
    holds_hopper_tiles,
)
from vllm.utils.math import cdiv, next_power

MAX_SPLITS = 64

FEW_GROUPS = 16
"""Up to so many (row, KV head) a launch is a matter of latency: one program a processor."""

LONG_SPLIT = 2048
"""Keys of one program where there are programs left to share them."""

VALUE_PART = 64
"""Elements of a head's values that one of several programs sums."""

PREFIX_ALIGNMENT = 128
"""Tiles of keys of prompts are of this length, or a part of it."""

_MOST_PROGRAMS = 4  # a processor, where rows are long
_LEAST_SIDE = 16  # of a tile that tensor cores multiply
_SUM_BYTES = 4  # of what warps tell each other of a row
_LEAST_STAGES = 2  # one tile is under way while one is multiplied
_MOST_FOLDED = 16 * 16 * 576  # elements of even splits, all of which one program reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Sizes of a program's work.

    Attributes:
        block_m: query heads (decode) or query tokens (prefill).
        block_n: keys of one tile.
        per_processor: programs that a processor has at once.
        value_parts: programs that share a head's values, each with all keys.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_processor: int = 2
    value_parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Programs that share one row's keys.

    Attributes:
        launched: what a long row may take.
        even: what a row takes that is no longer than so many times `LONG_SPLIT`.
    """

    launched: int
    even: int


def split_head(head_size: int) -> tuple[int, int]:
    """Return the two powers of two that cover a head, each at least 16; the second may be 0."""
    whole = next_power(max(head_size, 16))
    main = whole // 2
    if main < 16 or head_size <= main:
        return whole, 0
    tail = next_power(max(head_size - main, 16))
    return (main, tail) if tail < main else (whole, 0)


@functools.cache
def fit_decode_tile(
    group: int,
    head_size: int,
    itemsize: int,
    has_one_field: bool,
    num_groups: int,
    device: torch.device,
) -> Tile:
    """Return the tile of decode rows: `group` query heads share a KV head, of `num_groups` in all.

    As measured on an H200. A stage less than `num_stages` is how many tiles are under way. Eight
    warps on 64 keys are soonest done, as each thread has the fewest addresses to work out: best as
    long as all groups have a program at once. Where they have not, many small programs hide each
    other's beginnings; where such tiles would leave a processor one program, a few tens of groups
    bear it and more do not. One row of latents is the exception: to fold its splits is most of the
    work, which programs share that read the same keys and sum parts of the values.
    """
    row_bytes = sum(split_head(head_size)) * itemsize
    most_heads = 64 if row_bytes <= 256 else 32
    block_m = min(next_power(max(group, 16)), most_heads)
    if itemsize == 4:  # no tensor core computes in float32
        block_n, num_stages = (32, 3) if row_bytes <= 512 else (16, 1 if row_bytes > 1280 else 2)
        return Tile(block_m=block_m, block_n=block_n, num_warps=8, num_stages=num_stages)
    if row_bytes <= 256 and num_groups <= 2 * count_processors(device):
        return Tile(block_m=block_m, block_n=64, num_warps=8, num_stages=3)
    if row_bytes <= 256:
        num_warps = 4 if block_m <= 32 else 8
        return Tile(block_m=block_m, block_n=32, num_warps=num_warps, num_stages=3)
    if row_bytes <= 512 and num_groups <= 64:
        return Tile(block_m=block_m, block_n=64, num_warps=8, num_stages=3, per_processor=1)
    if row_bytes <= 512:
        return Tile(block_m=block_m, block_n=32, num_warps=4, num_stages=4)
    if not has_one_field:
        return Tile(block_m=block_m, block_n=16, num_warps=8, num_stages=2)
    if num_groups == 1:
        value_parts = cdiv(head_size, VALUE_PART)
        return Tile(block_m=block_m, block_n=64, num_warps=4, num_stages=2, value_parts=value_parts)
    num_warps = 4 if block_m == 16 else 8
    return Tile(block_m=block_m, block_n=32, num_warps=num_warps, num_stages=3)


@functools.cache
def fit_chunk_tile(head_size: int, itemsize: int) -> Tile:
    """Return the tile of rows with few new tokens: many pairs of token and head share a KV head."""
    row_bytes = sum(split_head(head_size)) * itemsize
    if itemsize == 4:
        return Tile(block_m=16, block_n=32 if row_bytes <= 512 else 16, num_warps=8, num_stages=1)
    if row_bytes <= 256:
        return Tile(block_m=64, block_n=64, num_warps=4, num_stages=3)
    if row_bytes <= 512:
        return Tile(block_m=64, block_n=32, num_warps=8, num_stages=3)
    return Tile(block_m=32, block_n=32, num_warps=8, num_stages=2)


@functools.cache
def fit_prefill_tile(
    head_size: int, itemsize: int, has_one_field: bool, device: torch.device
) -> Tile:
    """Return the tile of rows with many new tokens."""
    row_bytes = sum(split_head(head_size)) * itemsize
    if itemsize == 4:  # no tensor core computes in float32
        side = 32 if row_bytes <= 512 else 16
        return Tile(block_m=side, block_n=side, num_warps=4, num_stages=1)
    if row_bytes > 512:
        num_stages = 2 if has_one_field or holds_hopper_tiles(device) else 1
        block_m = 64 if holds_hopper_tiles(device) else 32  # sums fill the registers
        return Tile(block_m=block_m, block_n=32, num_warps=8, num_stages=num_stages)
    if holds_hopper_tiles(device):
        block_n, num_stages = (128, 3) if row_bytes <= 128 else (128, 2)
        if row_bytes > 256:
            block_n = 64
        return Tile(block_m=128, block_n=block_n, num_warps=8, num_stages=num_stages)
    if row_bytes <= 128:
        return Tile(block_m=128, block_n=64, num_warps=4, num_stages=3)
    if row_bytes <= 256:
        return Tile(block_m=128, block_n=64, num_warps=8, num_stages=2)
    return Tile(block_m=64, block_n=64, num_warps=8, num_stages=2)


@functools.cache
def cut_tile(
    tile: Tile, head_size: int, itemsize: int, has_one_field: bool, device: torch.device
) -> Tile:
    """Return the tile with fewer stages, keys or queries where shared memory has no more room."""
    sizes = sum(split_head(head_size)) * itemsize, itemsize, has_one_field
    while count_shared_bytes(tile, *sizes) > find_shared_bytes(device):
        if tile.num_stages > _LEAST_STAGES:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_n > _LEAST_SIDE:
            tile = replace(tile, block_n=tile.block_n // 2)
        elif tile.block_m > _LEAST_SIDE:
            tile = replace(tile, block_m=tile.block_m // 2)
        else:
            break  # the launch says what it lacks
    return tile


def count_shared_bytes(tile: Tile, row_bytes: int, itemsize: int, has_one_field: bool) -> int:
    """Return what a program takes at most: queries with their weights of keys; keys and values.

    Args:
        tile: sizes.
        row_bytes: of a head, with what its two powers of two have more.
        itemsize: bytes of an element.
        has_one_field: whether values are keys, so that both lie there once.
    """
    value_bytes = 0 if has_one_field else row_bytes
    if tile.value_parts > 1:
        value_bytes = VALUE_PART * itemsize
    query_bytes = row_bytes + tile.block_n * itemsize + _SUM_BYTES
    key_bytes = max((tile.num_stages - 1) * (row_bytes + value_bytes), row_bytes)
    return tile.block_m * query_bytes + tile.block_n * key_bytes


def count_splits(
    num_groups: int, longest_view: int, tile: Tile, value_elements: int, num_processors: int
) -> Splits:
    """Return how many programs share one row's keys.

    Args:
        num_groups: programs without splitting.
        longest_view: most keys that a row sees.
        tile: what each of them works on.
        value_elements: of a head, that each of them sums.
        num_processors: of the device.
    """
    most_tiles = cdiv(longest_view, tile.block_n) + 1  # a window need not begin where a tile does
    limit = min(most_tiles, MAX_SPLITS)
    groups = max(num_groups, 1)
    programs = num_processors * (1 if groups <= FEW_GROUPS else tile.per_processor)
    folded = max(_MOST_FOLDED // (tile.block_m * value_elements), 1)
    even = max(1, min(round(programs / groups), folded, limit))
    most = min(_MOST_PROGRAMS * num_processors // groups, limit)
    if longest_view <= even * LONG_SPLIT:
        most = even
    return Splits(launched=max(most, even), even=even)
