"""Which kernel form multiplies few rows by a weight, by shape.

A plain table, no tuning at run time. Called by `linear.py` beside it and by
`model_executor/layers/linear.py`, which leaves the other shapes to torch. Measured with
`benchmarks/kernels/linear.py`. Imports no triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from vllm._custom_ops.triton.device import count_processors, has_warp_group_products
from vllm._custom_ops.triton.stream_table import FEW_ROWS, MAX_PARTS, count_stream_parts
from vllm.utils.math import cdiv

MAX_ROWS = 64
"""More rows are torch's."""

MAX_WEIGHT_ELEMENTS = 1 << 30
"""Larger weights are torch's: none was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkinnyConfig:
    """How one kernel runs.

    Attributes:
        is_vector: multiply without tensor cores; for one row only.
        block_n: outputs of a program; gated ones count once.
        block_k: elements of K that are on their way together.
        num_stages: tiles that are on their way at once; 1 leaves it to the loads of one tile.
        programs_per_sm: K is split as long as there are at most so many; no more than run at once,
            or the last ones run alone.
        is_swapped: see `product.multiply_tile`.
    """

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int = 4
    programs_per_sm: int = 4
    is_vector: bool = False
    is_swapped: bool = False


_UNBOUNDED = 1 << 62
_FULL_SHARE = 0.9  # of the processors' room; then few rows need not stream


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Which products; `k_step` divides their K. Torch multiplies those where `is_ours` is not.

    `before_hopper` is the form for devices whose warps multiply one by one, if it is another.
    """

    max_rows: int
    is_gated: bool
    max_outputs: int = _UNBOUNDED
    max_k: int = _UNBOUNDED
    k_step: int = 1
    config: SkinnyConfig
    before_hopper: SkinnyConfig | None = None
    is_ours: bool = True

    def fits(self, num_rows: int, num_outputs: int, k: int, is_gated: bool) -> bool:
        return (
            num_rows <= self.max_rows
            and is_gated == self.is_gated
            and num_outputs <= self.max_outputs
            and k <= self.max_k
            and k % self.k_step == 0
        )


_VECTOR = SkinnyConfig(block_n=8, block_k=512, num_stages=1, programs_per_sm=8, is_vector=True)
_LONG_VECTOR = replace(_VECTOR, block_k=1024, programs_per_sm=6)
_SMALL = SkinnyConfig(block_n=32, block_k=256, num_stages=4, programs_per_sm=3)
_SPLIT = SkinnyConfig(block_n=64, block_k=128, num_stages=4, programs_per_sm=2)
_STREAM = SkinnyConfig(block_n=64, block_k=128, num_stages=4, programs_per_sm=2, is_swapped=True)
_STREAM_ONE = replace(_STREAM, programs_per_sm=1)
_STREAM_FOUR = SkinnyConfig(
    block_n=64, block_k=64, num_stages=5, programs_per_sm=4, is_swapped=True
)
_PAIR = SkinnyConfig(block_n=64, block_k=64, num_stages=3, programs_per_sm=2, is_swapped=True)
_MANY_GATED = SkinnyConfig(block_n=64, block_k=64, num_stages=6, programs_per_sm=4)
_MANY = SkinnyConfig(block_n=128, block_k=64, num_stages=4, programs_per_sm=2)

_TABLE = (
    _Row(max_rows=1, is_gated=True, max_outputs=1024, k_step=512, config=_VECTOR),
    _Row(max_rows=32, is_gated=True, max_outputs=1024, config=_SMALL),
    _Row(max_rows=32, is_gated=True, max_outputs=4096, config=_SPLIT, is_ours=False),
    _Row(max_rows=32, is_gated=True, max_outputs=16384, config=_SPLIT),
    _Row(max_rows=32, is_gated=True, config=_STREAM_ONE, before_hopper=_PAIR),
    _Row(max_rows=64, is_gated=True, max_outputs=16384, config=_SPLIT, is_ours=False),
    _Row(max_rows=64, is_gated=True, config=_MANY_GATED, before_hopper=_PAIR),
    _Row(max_rows=1, is_gated=False, max_outputs=2048, k_step=1024, config=_LONG_VECTOR),
    _Row(max_rows=1, is_gated=False, max_outputs=3584, max_k=2560, k_step=512, config=_VECTOR),
    _Row(max_rows=32, is_gated=False, max_outputs=1024, config=_SMALL),
    _Row(max_rows=32, is_gated=False, max_outputs=16384, max_k=2560, config=_SPLIT, is_ours=False),
    _Row(max_rows=16, is_gated=False, max_outputs=2048, config=_SPLIT),
    _Row(
        max_rows=16,
        is_gated=False,
        max_outputs=4096,
        max_k=4096,
        config=_STREAM_ONE,
        before_hopper=_STREAM,
    ),
    _Row(max_rows=16, is_gated=False, max_outputs=8192, config=_STREAM),
    _Row(max_rows=32, is_gated=False, max_outputs=4096, config=_SPLIT),
    _Row(max_rows=32, is_gated=False, max_outputs=16384, config=_SPLIT, is_ours=False),
    _Row(max_rows=16, is_gated=False, max_outputs=32768, config=_STREAM_FOUR),
    _Row(max_rows=32, is_gated=False, max_outputs=32768, config=_SPLIT),
    _Row(max_rows=32, is_gated=False, config=_STREAM),
    _Row(max_rows=64, is_gated=False, max_outputs=16384, config=_SPLIT, is_ours=False),
    _Row(max_rows=64, is_gated=False, config=_MANY, is_ours=False),
)
"""The first row that fits counts.

Microseconds on an H200 in bfloat16, cold weights, one product alone in a graph; ours and torch's,
which has no activation in it (another 2 us), at 1, 16 and 64 rows. In a step torch's take a little
longer: they are launched only when their inputs are there, ours before that (`overlap.py`):

    outputs x k                     ours                 torch
    qkv         4608 x 3584       11.5  12.1  16.4     11.4  11.3  11.5
    o           3584 x 3584        9.9  10.0  14.7     10.9  11.0   9.8
    gate_up  2x18944 x 3584       68.8  69.0  73.9     71.9  73.0  75.7
    down        3584 x 18944      35.6  37.0  45.6     38.4  38.2  43.5
    output    152064 x 3584        243   250   273      259   264   274
    gate_up  2x10240 x 2560       31.0  31.6  36.8     29.0  29.7  28.7
    in         18560 x 4096       38.0  38.7  41.4     42.3  43.3  41.3
    up         21504 x 4096       43.3  43.8    -      43.9  45.6    -
    down        4096 x 21504      43.5  44.8    -      44.7  45.6    -
    out         4096 x 8192       19.4  20.4    -      21.2  21.7    -
    qkv         6144 x 4096       15.5  16.0    -      15.6  16.2    -
    out         2048 x 4096        7.5   8.7  13.7      9.5   9.8  10.2
    o           2560 x 2048        6.2   7.4  11.8      6.4   6.4   6.7
    shared    2x2816 x 2048       10.8  11.8  18.1      8.4   8.3   9.6
    shared    2x512  x 2048        5.6   6.8  15.9     13.0   6.0   5.9
    kv_a         576 x 2048        4.0   5.0  12.0      6.1   5.9   6.0

Instructions of sm_80 on the same GPU, played as 108 processors, at 16, 32 and 64 rows: what was
chosen for Hopper, and what is better there, since two programs find room on a processor:

    gate_up  2x18944 x 3584       76.7  75.7 204.8     68.1  69.8  77.8   (_PAIR)
    o           3584 x 3584       12.7    -     -      10.5    -     -    (_STREAM)
"""


def is_skinny(num_rows: int, num_outputs: int, k: int, *, is_gated: bool = False) -> bool:
    """Whether our kernels, not torch's, multiply `num_rows` rows of k by a weight.

    Args:
        num_rows: rows of the input.
        num_outputs: elements of a result row, half of the weight's rows if `is_gated`.
        k: elements of an input row.
        is_gated: whether gate and up are joined by an activation.
    """
    num_weights = num_outputs * k * (2 if is_gated else 1)
    if not 0 < num_rows <= MAX_ROWS or num_weights > MAX_WEIGHT_ELEMENTS or k % 8:
        return False
    return _find_row(num_rows, num_outputs, k, is_gated).is_ours


def choose_config(
    num_rows: int, num_outputs: int, k: int, *, is_gated: bool, has_warp_groups: bool
) -> SkinnyConfig:
    """Return how to multiply up to MAX_ROWS rows.

    Args:
        num_rows, num_outputs, k, is_gated: as in `is_skinny`.
        has_warp_groups: what `device.has_warp_group_products` says.
    """
    row = _find_row(num_rows, num_outputs, k, is_gated)
    return row.config if has_warp_groups else row.before_hopper or row.config


def _find_row(num_rows: int, num_outputs: int, k: int, is_gated: bool) -> _Row:
    for row in _TABLE:
        if row.fits(num_rows, num_outputs, k, is_gated):
            return row
    raise AssertionError(f"no row of the table serves {num_rows} rows")


def count_splits(config: SkinnyConfig, num_outputs: int, k: int, num_sms: int) -> tuple[int, int]:
    """Return into how many parts K is split, and the blocks of K in each (the last may have less).

    Every part has at least one block.
    """
    num_tiles = -(-num_outputs // config.block_n)
    num_blocks = -(-k // config.block_k)
    wanted = max(1, config.programs_per_sm * num_sms // num_tiles)
    split_blocks = -(-num_blocks // min(wanted, num_blocks))
    return -(-num_blocks // split_blocks), split_blocks


def is_streamed(num_rows: int, num_outputs: int, k: int, num_sms: int) -> bool:
    """Whether a product that leaves parts streams its weights, where the device can do that.

    Args:
        num_rows, num_outputs, k: as in `is_skinny`.
        num_sms: multiprocessors of the device.
    """
    sizes = num_rows, num_outputs, k
    if not count_stream_parts(*sizes, num_sms):
        return False
    if num_rows > FEW_ROWS or not is_skinny(*sizes):
        return True
    config = choose_config(*sizes, is_gated=False, has_warp_groups=True)
    num_parts, _ = count_splits(config, num_outputs, k, num_sms)
    num_programs = num_parts * cdiv(num_outputs, config.block_n)
    return num_programs < _FULL_SHARE * config.programs_per_sm * num_sms


def count_parts(num_rows: int, num_outputs: int, k: int, device: torch.device) -> int:
    """Return how many parts `skinny_linear_parts` is to leave, 0 where another product is faster.

    Args:
        num_rows, num_outputs, k: as in `is_skinny`.
        device: where the product runs.
    """
    if device.type != "cuda" or not 0 < num_rows <= MAX_ROWS:
        return 0
    num_sms, sizes = count_processors(device), (num_rows, num_outputs, k)
    has_warp_groups = has_warp_group_products(device)
    if has_warp_groups and is_streamed(*sizes, num_sms):
        return count_stream_parts(*sizes, num_sms)
    if not is_skinny(*sizes):
        return 0
    config = choose_config(*sizes, is_gated=False, has_warp_groups=has_warp_groups)
    num_parts, _ = count_splits(config, num_outputs, k, num_sms)
    return min(num_parts, MAX_PARTS) if num_parts > 1 else 0
