"""Which tile sizes an attention launch takes, and how many splits: arithmetic on shapes.

Called by `attention_decode.py` and `attention_prefill.py` on the host. Knows no tensor, only sizes
and the device; nothing is tuned at run time. Tiles fit the shared memory of an sm_80 (163 KiB a
block) or an sm_90 (227 KiB): a stage holds one K and one V tile beside the query tile.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from vllm._custom_ops.triton.device import is_hopper
from vllm.utils.math import cdiv, next_power

MAX_SPLITS = 64  # a power of two; a fold reads them one after the other

FEW_GROUPS = 16
"""Up to so many (row, KV head) a launch is a matter of latency: long tiles, one after the other."""

LONG_SPLIT = 2048
"""Keys of one program where there are programs left to share them."""

PREFIX_ALIGNMENT = 128
"""Tiles of keys of prompts are of this length, or a part of it."""

_EVEN_PROGRAMS = 2  # a processor, which is what it holds of them at once
_MOST_PROGRAMS = 4  # a processor, where rows are long


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Sizes of a program's work.

    Attributes:
        block_m: query heads (decode) or query tokens (prefill).
        block_n: keys of one tile.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


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
    device: torch.device,
    has_few_groups: bool = False,
) -> Tile:
    """Return the tile of decode rows: `group` query heads share a KV head.

    Short tiles in many stages stream best. Few programs are done sooner with long tiles, of which
    each has only one or two.
    """
    row_bytes = sum(split_head(head_size)) * itemsize
    most_heads = 64 if row_bytes <= 256 else 32
    block_m = min(next_power(max(group, 16)), most_heads)
    if row_bytes > 512 and not (has_one_field and itemsize == 2):
        num_stages = 1 if row_bytes > 1280 else 3 if is_hopper(device) else 2
        return Tile(block_m=block_m, block_n=16, num_warps=8, num_stages=num_stages)
    if has_few_groups:
        block_n, num_warps = (128, 4) if row_bytes <= 256 else (64, 8)
        return Tile(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=3)
    # Two stages of the five are the block table's, whose units a load of rows waits for.
    num_warps = 4 if itemsize == 2 and block_m * row_bytes <= 20480 else 8
    block_n = 64 if row_bytes <= 128 else 32
    return Tile(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=5)


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
    return Tile(block_m=32, block_n=32, num_warps=8, num_stages=3)


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
        num_stages = 2 if has_one_field or is_hopper(device) else 1
        block_m = 64 if is_hopper(device) else 32  # sums fill the registers
        return Tile(block_m=block_m, block_n=32, num_warps=8, num_stages=num_stages)
    if is_hopper(device):
        block_n, num_stages = (128, 3) if row_bytes <= 128 else (128, 2)
        if row_bytes > 256:
            block_n = 64
        return Tile(block_m=128, block_n=block_n, num_warps=8, num_stages=num_stages)
    if row_bytes <= 128:
        return Tile(block_m=128, block_n=64, num_warps=4, num_stages=3)
    if row_bytes <= 256:
        return Tile(block_m=128, block_n=64, num_warps=8, num_stages=2)
    return Tile(block_m=64, block_n=64, num_warps=8, num_stages=2)


def count_splits(num_groups: int, longest_view: int, block_n: int, num_processors: int) -> Splits:
    """Return how many programs share one row's keys.

    Args:
        num_groups: programs without splitting.
        longest_view: most keys that a row sees.
    """
    most_tiles = cdiv(longest_view, block_n) + 1  # a window need not begin where a tile does
    limit = min(most_tiles, MAX_SPLITS)
    groups = max(num_groups, 1)
    even = max(1, min(round(_EVEN_PROGRAMS * num_processors / groups), limit))
    most = min(cdiv(_MOST_PROGRAMS * num_processors, groups), limit)
    if longest_view <= even * LONG_SPLIT:
        most = even
    return Splits(launched=max(most, even), even=even)
