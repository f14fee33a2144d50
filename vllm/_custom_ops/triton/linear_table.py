"""Which kernel form multiplies few rows by a weight, by shape.

A plain table, no tuning at run time. Called by `linear.py` beside it and by
`model_executor/layers/linear.py`, which leaves the other shapes to torch. Measured with
`benchmarks/kernels/linear.py`. Imports no triton.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 64
"""More rows are torch's."""

MAX_WEIGHT_ELEMENTS = 1 << 28
"""Larger weights (output matrices) are torch's, which reads them at full bandwidth."""

NARROW = 8192
"""Up to this many outputs a weight has too few tiles to fill a GPU without splits of K."""


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


_UNBOUNDED = 1 << 62


def _row(max_rows: int, is_gated: bool, max_outputs: int, config: SkinnyConfig) -> _Row:
    return _Row(max_rows=max_rows, is_gated=is_gated, max_outputs=max_outputs, config=config)


_VECTOR = SkinnyConfig(block_n=8, block_k=512, num_stages=1, programs_per_sm=8, is_vector=True)
_VECTOR_NARROW = SkinnyConfig(
    block_n=16, block_k=512, num_stages=1, programs_per_sm=4, is_vector=True
)
_NARROW_16 = SkinnyConfig(block_n=32, block_k=128, num_stages=5, programs_per_sm=4)
_WIDE_16 = SkinnyConfig(block_n=64, block_k=128, num_stages=4, programs_per_sm=2)
_GATED_16 = SkinnyConfig(block_n=32, block_k=128, num_stages=4, programs_per_sm=2)
_NARROW_64 = SkinnyConfig(block_n=64, block_k=128, num_stages=4, programs_per_sm=2)
_WIDE_64 = SkinnyConfig(block_n=128, block_k=64, num_stages=4, programs_per_sm=2)
_GATED_64 = SkinnyConfig(block_n=64, block_k=64, num_stages=4, programs_per_sm=2)

_TABLE = (
    _row(1, False, NARROW, _VECTOR_NARROW),
    _row(1, False, _UNBOUNDED, _VECTOR),
    _row(1, True, _UNBOUNDED, _VECTOR),
    _row(16, False, NARROW, _NARROW_16),
    _row(16, False, _UNBOUNDED, _WIDE_16),
    _row(16, True, _UNBOUNDED, _GATED_16),
    _row(64, False, NARROW, _NARROW_64),
    _row(64, False, _UNBOUNDED, _WIDE_64),
    _row(64, True, _UNBOUNDED, _GATED_64),
)
"""The first row that fits counts."""


def is_skinny(num_rows: int, n: int, k: int) -> bool:
    """Whether our kernels, not torch's, multiply `num_rows` rows of k by a weight [n, k]."""
    return 0 < num_rows <= MAX_ROWS and n * k <= MAX_WEIGHT_ELEMENTS and k % 8 == 0


def choose_config(num_rows: int, num_outputs: int, *, is_gated: bool) -> SkinnyConfig:
    """Return how to multiply up to MAX_ROWS rows.

    `num_outputs` are the elements of a result row, half of the weight's rows if `is_gated`.
    """
    for row in _TABLE:
        if num_rows <= row.max_rows and is_gated == row.is_gated and num_outputs <= row.max_outputs:
            return row.config
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
