"""What programs that share a row's keys do for each other: which tiles each takes, what it leaves
in memory, and how the last of them folds that.

Called by `attention_decode.py`, inside its kernel only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm._custom_ops.triton.attention_pieces import NOTHING, append, scale_pieces, zero_pieces


@triton.jit
def _cut(count, size):
    """Return cdiv(count, size); a division of integers would take much longer."""
    share = 1.0 / size.to(tl.float32)
    whole = (count.to(tl.float32) * share).to(tl.int32)  # one too few at most, at a multiple
    return whole + (whole * size < count).to(tl.int32)


@triton.jit
def take_tiles(split, num_tiles, num_splits, even_splits, long_tiles):
    """Return (first tile of a split, end, splits in use).

    Only a row whose parts would else be long takes more than `even_splits`.
    """
    even_tiles = tl.minimum(_cut(num_tiles, even_splits), long_tiles)
    size = tl.maximum(_cut(num_tiles, num_splits), even_tiles)
    begin = split * size
    return begin, tl.minimum(begin + size, num_tiles), _cut(num_tiles, size)


@triton.jit
def _places(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def load_sinks(places, is_seen):
    """Load learned sinks as logits in units of log2, float32."""
    sinks = tl.load(places, mask=is_seen, other=float("-inf"))
    return sinks.to(tl.float32) * 1.4426950408889634


@triton.jit
def find_group(partial, tops, group, num_splits, BLOCK_M: tl.constexpr, SIZE: tl.constexpr):
    """Return where the splits of a program group have their means and their tops.

    Means stand as [group, split, pair, element]: a fold reads what lies together.
    """
    first = group.to(tl.int64) * num_splits * BLOCK_M
    return partial + first * SIZE, tops + first


@triton.jit
def is_last_split(arrival, num_used):
    """Return whether all other splits of a group have stored what they leave before this one."""
    tl.debug_barrier()  # every thread has stored before one of them says so
    is_last = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == num_used - 1
    tl.debug_barrier()
    if is_last:
        tl.store(arrival, 0)  # as the next launch expects it
    return is_last


@triton.jit
def store_split(own, tops, split, sums, top, BLOCK_M: tl.constexpr, SIZE: tl.constexpr):
    """Store the means of one split, SIZE elements of each pair, and logarithms of their weights."""
    places = own + split * SIZE * BLOCK_M
    for i in tl.static_range(len(sums)):
        tl.store(places + _places(BLOCK_M, sums[i].shape[1]), sums[i])
        places += sums[i].shape[1] * BLOCK_M
    tl.store(tops + split * BLOCK_M + tl.arange(0, BLOCK_M), top)


@triton.jit
def fold_splits(own, tops, num_used, BLOCK_M: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """Add the splits of one program group in their order; (sums, total).

    No thread needs what another has loaded, so that several splits are under way at once.
    """
    SIZE: tl.constexpr = MAIN + TAIL
    UNROLL: tl.constexpr = min(8, max(16384 // (BLOCK_M * SIZE), 1))
    sums = zero_pieces(BLOCK_M, MAIN, TAIL)
    total = tl.zeros((BLOCK_M,), tl.float32)
    biggest = tl.full((BLOCK_M,), NOTHING, tl.float32)
    places = tops + tl.arange(0, BLOCK_M)
    for begin in range(0, num_used, UNROLL):
        loaded, grown = (), biggest
        for i in tl.static_range(UNROLL):
            top = tl.load(
                places + (begin + i) * BLOCK_M, mask=begin + i < num_used, other=float("-inf")
            )
            loaded, grown = append(loaded, top), tl.maximum(grown, top)
        factor = tl.exp2(biggest - grown)
        sums, total, biggest = scale_pieces(sums, factor), total * factor, grown
        for i in tl.static_range(UNROLL):
            weight = tl.exp2(loaded[i] - grown)
            total += weight
            sums = _add_split(
                sums, own + (begin + i) * SIZE * BLOCK_M, begin + i < num_used, weight, BLOCK_M
            )
    return sums, total


@triton.jit
def _add_split(sums, places, is_in, weight, BLOCK_M: tl.constexpr):
    added = ()
    for i in tl.static_range(len(sums)):
        part = tl.load(places + _places(BLOCK_M, sums[i].shape[1]), mask=is_in, other=0.0)
        places += sums[i].shape[1] * BLOCK_M
        added = append(added, sums[i] + part * weight[:, None])
    return added
