"""Which products of few rows stream their weights through Hopper's copy engine, and in which tiles.

Called by `linear_table.py` and `linear.py` beside it. All programs of such a product run at once,
one on a multiprocessor, so that what counts is how many of those have work: where the tiles of a
weight, each cut into as many parts of K as fit, leave too many idle, other kernels are faster.
Imports no triton.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.utils.math import cdiv

MAX_PARTS = 9
"""The kernels that add up parts are fast up to here."""

K_STEP = 8
"""Divides K: 16 bytes, what strides of the copy engine are multiples of."""

FEW_ROWS = 32
"""With more of them, what is stored counts."""

_MIN_SHARE = 0.8  # of the processors that have work
_MIN_GATED_SHARE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTile:
    """Weight rows of a program and its ring.

    Attributes:
        wide: weight rows of one product of a warp group, of which there are two side by side.
        narrow: more of them in another product, or 0; then 16 at least.
        num_stages: blocks of K that are on their way at once.
        block_k: elements of K in a block. Twice as many take up to 3 us off a layer's product: the
            program turns to its ring half as often.
    """

    wide: int
    narrow: int = 0
    num_stages: int
    block_k: int = 128

    @property
    def half(self) -> int:
        """Half of the weight rows; in a gated product those of the gate."""
        return self.wide + self.narrow


_LARGE = StreamTile(wide=128, num_stages=5, block_k=64)
_SMALL = StreamTile(wide=64, num_stages=4)
_GATED = (
    StreamTile(wide=128, narrow=16, num_stages=2),
    StreamTile(wide=64, narrow=16, num_stages=7, block_k=64),
)

_LONG_K = 8192
_SHORT = frozenset({(4608, 3584), (3584, 3584)})
"""Outputs and K, of less than _LONG_K, where many rows stream too; torch is fast there."""


def choose_tile(num_rows: int, num_outputs: int, num_sms: int) -> StreamTile:
    """Return the tile of a product that leaves parts.

    Large tiles read the input less often; small ones leave fewer parts, which are worth more the
    more rows they have.
    """
    is_small = num_rows > FEW_ROWS or num_sms // cdiv(num_outputs, 2 * _LARGE.half) > MAX_PARTS
    return _SMALL if is_small else _LARGE


def count_stream_parts(num_rows: int, num_outputs: int, k: int, num_sms: int) -> int:
    """Return how many parts of K the programs of a product leave; 0 where it is not to stream."""
    if num_rows > FEW_ROWS and k < _LONG_K and (num_outputs, k) not in _SHORT:
        return 0
    tile = choose_tile(num_rows, num_outputs, num_sms)
    num_tiles, num_blocks = cdiv(num_outputs, 2 * tile.half), cdiv(k, tile.block_k)
    wanted = min(num_sms // num_tiles, MAX_PARTS, num_blocks)
    if wanted == 0 or wanted * num_tiles < _MIN_SHARE * num_sms or k % K_STEP:
        return 0
    return cdiv(num_blocks, cdiv(num_blocks, wanted))


def choose_gated_tile(num_outputs: int, k: int, num_sms: int) -> StreamTile | None:
    """Return the tile of a gated product, None where it is not to stream."""
    for tile in _GATED if k % K_STEP == 0 else ():
        if _MIN_GATED_SHARE * num_sms <= cdiv(num_outputs, tile.half) <= num_sms:
            return tile
    return None
