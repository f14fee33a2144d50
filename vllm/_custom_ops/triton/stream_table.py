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

FEW_ROWS = 16
"""With more of them what is read of the input and written counts, not the weight alone."""

_MIDDLE_ROWS = 32
_LONG_K = 8192
_MIN_SHARE = 0.5  # of the processors, where MAX_PARTS leaves some idle


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTile:
    """Weight rows of a program and its ring.

    Attributes:
        wide: weight rows of one product of a warp group, of which there are two side by side.
        narrow: more of them in another product, or 0; then 16 at least.
        num_stages: blocks of K that are on their way at once.
        block_k: elements of K in a block.
        min_share: of the processors that have work; with less of it other kernels are faster.
    """

    wide: int
    narrow: int = 0
    num_stages: int
    block_k: int
    min_share: float

    @property
    def half(self) -> int:
        """Half of the weight rows; in a gated product those of the gate."""
        return self.wide + self.narrow


_LARGE = StreamTile(wide=128, num_stages=5, block_k=64, min_share=0.7)
_SMALL = StreamTile(wide=64, num_stages=4, block_k=128, min_share=0.8)
_SMALLEST = StreamTile(wide=32, num_stages=3, block_k=256, min_share=0.95)
_GATED = (
    StreamTile(wide=128, narrow=16, num_stages=2, block_k=128, min_share=0.95),
    StreamTile(wide=64, narrow=16, num_stages=3, block_k=128, min_share=0.95),
)
"""Large tiles read the input less often, small ones leave fewer parts.

Microseconds on an H200 in bfloat16: a layer of Qwen2 7B in a graph, with cold weights, by what its
products are (`benchmarks/kernels/chain.py`):

    rows                                     1       8      16      32      64
    whole products of `linear.py`, torch   133.7   138.3   143.0   155.2   167.4
    streamed                               125.5   131.6   134.2   143.3   155.9
    streamed, all of blocks of 64          128.7   137.5   141.6   151.5   168.6

and a product with the norm behind it, at 1, 16 and 64 rows; "parts" are those of `linear.py`:

    outputs x k          streamed              parts       whole, ours or torch's
    4096 x 8192      19.7  21.8  23.6      19.8  20.8        20.0  21.4  25.0
    4096 x 21504     45.0  46.4  48.7      43.4  44.5        43.6  45.5  50.1
    4096 x 14336     30.8  33.0  35.4      30.5  31.7        31.3  32.6  37.0
    4096 x 4096      11.5  11.9  15.0      11.5  11.7        12.1  13.0  14.6
    2560 x 10240     17.3  17.1  20.3      16.3  17.1        16.8  18.5  20.9
    gate and up, 2 x 10240 x 2560, gelu; alone
                     30.7  29.6  29.5                        30.4  31.2  31.3
"""

_SHORT = frozenset({(4608, 3584), (3584, 3584)})
"""Outputs and K below _LONG_K where more than _MIDDLE_ROWS stream; torch is fast there."""


def _count_programs(tile: StreamTile, num_outputs: int, num_sms: int) -> tuple[int, int]:
    """Return the tiles of a product and into how many parts each is cut; 0 where that is slow."""
    num_tiles = cdiv(num_outputs, 2 * tile.half)
    num_parts = num_sms // num_tiles
    return num_tiles, num_parts if num_tiles * num_parts >= tile.min_share * num_sms else 0


def choose_tile(num_rows: int, num_outputs: int, k: int, num_sms: int) -> StreamTile:
    """Return the tile of a product that leaves parts."""
    if num_rows <= (_MIDDLE_ROWS if k >= _LONG_K else FEW_ROWS):
        return _LARGE
    if num_rows > _MIDDLE_ROWS and _count_programs(_SMALLEST, num_outputs, num_sms)[1]:
        return _SMALLEST
    return _SMALL


def count_stream_parts(num_rows: int, num_outputs: int, k: int, num_sms: int) -> int:
    """Return how many parts of K the programs of a product leave; 0 where it is not to stream."""
    if num_rows > _MIDDLE_ROWS and k < _LONG_K and (num_outputs, k) not in _SHORT:
        return 0
    tile = choose_tile(num_rows, num_outputs, k, num_sms)
    num_tiles, num_parts = _count_programs(tile, num_outputs, num_sms)
    num_blocks = cdiv(k, tile.block_k)
    num_parts = min(num_parts, MAX_PARTS, num_blocks)
    if num_parts == 0 or num_parts * num_tiles < _MIN_SHARE * num_sms or k % K_STEP:
        return 0
    return cdiv(num_blocks, cdiv(num_blocks, num_parts))


def choose_gated_tile(num_outputs: int, k: int, num_sms: int) -> StreamTile | None:
    """Return the tile of a gated product, None where it is not to stream."""
    for tile in _GATED if k % K_STEP == 0 else ():
        if tile.min_share * num_sms <= cdiv(num_outputs, tile.half) <= num_sms:
            return tile
    return None
