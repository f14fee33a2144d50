"""Which kernel form multiplies few rows by a weight, by shape.

A plain table, no tuning at run time. Called by `linear.py` beside it and by
`model_executor/layers/linear.py`, which leaves the other shapes to torch. Measured with
`benchmarks/kernels/linear.py`. Imports no triton.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 64
"""More rows are torch's."""

MAX_WEIGHT_ELEMENTS = 1 << 30
"""Larger weights are torch's: offsets into a weight are 32-bit numbers."""

NARROW = 4096
WIDE = 16384
"""Between these numbers of outputs torch's own splits are as good on one H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkinnyConfig:
    """How one kernel runs.

    Attributes:
        is_vector: multiply without tensor cores; for one row only.
        block_n: outputs of a program; gated ones count once.
        block_k: elements of K that are on their way together.
        num_stages: tiles that are on their way at once; 1 leaves it to the loads of one tile.
        programs_per_sm: K is split as long as there are at most so many.
        is_swapped: see `product.multiply_tile`.
    """

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int = 4
    programs_per_sm: int = 4
    is_vector: bool = False
    is_swapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    max_rows: int
    is_gated: bool
    max_outputs: int
    config: SkinnyConfig
    is_faster: bool


_UNBOUNDED = 1 << 62


def _row(
    max_rows: int,
    is_gated: bool,
    max_outputs: int,
    config: SkinnyConfig,
    *,
    is_faster: bool = True,
) -> _Row:
    return _Row(
        max_rows=max_rows,
        is_gated=is_gated,
        max_outputs=max_outputs,
        config=config,
        is_faster=is_faster,
    )


_SPLIT = SkinnyConfig(block_n=64, block_k=128, num_stages=4, programs_per_sm=2)
_STREAM = SkinnyConfig(block_n=64, block_k=128, num_stages=4, programs_per_sm=3, is_swapped=True)
_STREAM_64 = SkinnyConfig(block_n=64, block_k=64, num_stages=6, programs_per_sm=4)

_TABLE = (
    _row(32, True, _UNBOUNDED, _STREAM),
    _row(64, True, _UNBOUNDED, _STREAM_64),
    _row(32, False, NARROW, _SPLIT),
    _row(32, False, WIDE, _SPLIT, is_faster=False),
    _row(32, False, _UNBOUNDED, _STREAM),
    _row(64, False, _UNBOUNDED, _STREAM_64, is_faster=False),
)
"""The first row that fits counts; where ours is not faster, layers leave the product to torch.

Microseconds on an H200 in bfloat16, ours and torch's, at 1, 16 and 64 rows of Qwen2-7B's shapes:
o (3584 x 3584) 10.1, 10.6, 14.8 and 11.7, 11.9, 9.7; down (3584 x 18944) 35.8, 37.3, 45.7 and 38.9,
39.6, 40.4; gate and up with the activation 68.3, 68.9, 74.2 and, without it, 71.8, 73.4, 74.8; the
output matrix (152064 x 3584) 242, 250, 274 and 259, 264, 275; qkv (4608 x 3584) 12.0, 12.3, 16.5
and 11.0, 11.2, 11.4.
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
    return _find_row(num_rows, num_outputs, is_gated).is_faster


def choose_config(num_rows: int, num_outputs: int, *, is_gated: bool) -> SkinnyConfig:
    """Return how to multiply up to MAX_ROWS rows; arguments as in `is_skinny`."""
    return _find_row(num_rows, num_outputs, is_gated).config


def _find_row(num_rows: int, num_outputs: int, is_gated: bool) -> _Row:
    for row in _TABLE:
        if num_rows <= row.max_rows and is_gated == row.is_gated and num_outputs <= row.max_outputs:
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
