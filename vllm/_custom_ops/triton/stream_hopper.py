"""Products of few rows by Hopper's own means: weights stream through a ring of shared memory.

Called by `linear.py`, in tiles of `stream_table.py`. Each program takes one tile of outputs and one
part of K. The copy engine fills the ring with blocks of the weight before the program waits for the
kernels before it, which write no weights, and with blocks of the input after that. Rows of the
input are the M of the warp groups' products: 64, those that are not there are zeros that the copy
engine writes; weight rows are their N. A gated product has the same rows of gate and up in one
program. Parts of K are left in float32 for the kernel that comes next. Written in Gluon.

All programs run at once, so that the next kernel may begin before this one has waited
(`overlap.py`): it takes room from none. It still waits for all kernels before this one, since this
one does not end before them.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vllm._custom_ops.triton.copy_engine import can_copy, describe_tiles, runs_hopper_kernels
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start
from vllm._custom_ops.triton.product import activate
from vllm._custom_ops.triton.stream_table import FEW_ROWS, K_STEP, StreamTile
from vllm.utils.math import cdiv

_ROWS = 64  # of a warp group's product
_PLAIN = ""


@gluon.jit
def _bring_weights(
    wide_tiles, narrow_tiles, wides, narrows, full, block, stage, first, half_stride, is_there,
    WIDE: gl.constexpr, NARROW: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Have one block of K of a program's weight rows copied."""
    column = block * BLOCK_K
    for half in gl.static_range(2):
        row = first + half * half_stride
        tma.async_copy_global_to_shared(
            wide_tiles, [row, column], full, wides.index(stage * 2 + half), pred=is_there
        )
        if NARROW > 0:
            tma.async_copy_global_to_shared(
                narrow_tiles, [row + WIDE, column], full, narrows.index(stage * 2 + half),
                pred=is_there,
            )  # fmt: skip


@gluon.jit
def _store_tile(
    out, values, first, num_rows, N, out_stride, BY_ROWS: gl.constexpr, ROWS: gl.constexpr,
    WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store columns from `first` on; BY_ROWS, a warp has whole rows, not squares of 8 by 8."""
    EACH: gl.constexpr = 4 if values.dtype == gl.float32 else 8
    LANES: gl.constexpr = 32 if WIDTH > 32 * EACH else WIDTH // EACH
    LINES: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // LANES, LANES], [8, 1], [1, 0])
    TURNED: gl.constexpr = LINES if BY_ROWS else LAYOUT
    values = gl.convert_layout(values, TURNED)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, TURNED))[:, None]
    column = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, TURNED))[None, :]
    gl.store(out + row * out_stride + column, values, mask=(row < num_rows) & (column < N))


@gluon.jit
def _store_halves(
    out, sums, ups, first, num_rows, N, out_stride, dtype: gl.constexpr, HALF: gl.constexpr,
    ACTIVATION: gl.constexpr, BY_ROWS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store both halves of the sums; joined, where there is an activation."""
    if ACTIVATION == "":
        _store_tile(out, sums, first, num_rows, N, out_stride, BY_ROWS, ROWS, WIDTH, LAYOUT)
        _store_tile(out, ups, first + HALF, num_rows, N, out_stride, BY_ROWS, ROWS, WIDTH, LAYOUT)
    else:
        result = activate(sums.to(dtype), ups.to(dtype), 0.0, 0.0, ACTIVATION)
        _store_tile(out, result, first, num_rows, N, out_stride, BY_ROWS, ROWS, WIDTH, LAYOUT)


@fast_launch
@gluon.jit(do_not_specialize=["num_rows", "num_blocks", "split_blocks"])
def _stream_kernel(
    out,
    x_tiles,
    wide_tiles,
    narrow_tiles,
    num_rows,
    N,
    out_stride,
    part_stride,
    num_blocks,
    split_blocks,
    ACTIVATION: gl.constexpr,
    BY_ROWS: gl.constexpr,
    ROWS: gl.constexpr,
    WIDE: gl.constexpr,
    NARROW: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    dtype: gl.constexpr = x_tiles.dtype
    HALF: gl.constexpr = WIDE + NARROW
    LEAVES_PARTS: gl.constexpr = ACTIVATION == ""
    LAST: gl.constexpr = NARROW if NARROW > 0 else WIDE  # nothing is in it then
    wides = gl.allocate_shared_memory(dtype, [NUM_STAGES * 2, WIDE, BLOCK_K], wide_tiles.layout)
    if NARROW > 0:
        narrows = gl.allocate_shared_memory(
            dtype, [NUM_STAGES * 2, NARROW, BLOCK_K], narrow_tiles.layout
        )
    else:
        narrows = wides
    xs = gl.allocate_shared_memory(dtype, [NUM_STAGES, ROWS, BLOCK_K], x_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    let_next_start(True)
    first = gl.program_id(0) * HALF * (2 if LEAVES_PARTS else 1)
    half_stride = HALF if LEAVES_PARTS else N
    begin = gl.program_id(1) * split_blocks
    count = gl.minimum(split_blocks, num_blocks - begin)
    BYTES: gl.constexpr = (2 * HALF + ROWS) * BLOCK_K * 2
    for i in gl.static_range(NUM_STAGES):
        mbarrier.expect(full.index(i), BYTES, pred=i < count)
        _bring_weights(
            wide_tiles, narrow_tiles, wides, narrows, full.index(i), begin + i, i, first,
            half_stride, i < count, WIDE, NARROW, BLOCK_K,
        )  # fmt: skip
    await_inputs(True)
    for i in gl.static_range(NUM_STAGES):
        tma.async_copy_global_to_shared(
            x_tiles, [0, (begin + i) * BLOCK_K], full.index(i), xs.index(i), pred=i < count
        )
    L_WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, WIDE // 2, 16])
    L_LAST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LAST // 2, 16])
    sums = gl.zeros((ROWS, WIDE), gl.float32, layout=L_WIDE)
    ups = gl.zeros((ROWS, WIDE), gl.float32, layout=L_WIDE)  # of the other half
    if NARROW > 0:
        last_sums = gl.zeros((ROWS, LAST), gl.float32, layout=L_LAST)
        last_ups = gl.zeros((ROWS, LAST), gl.float32, layout=L_LAST)
    for i in range(count):
        stage = i % NUM_STAGES
        mbarrier.wait(full.index(stage), i // NUM_STAGES & 1)
        x, place = xs.index(stage), stage * 2
        sums = warpgroup_mma(x, wides.index(place).permute((1, 0)), sums, is_async=True)
        ups = warpgroup_mma(x, wides.index(place + 1).permute((1, 0)), ups, is_async=True)
        if NARROW > 0:
            last_sums = warpgroup_mma(
                x, narrows.index(place).permute((1, 0)), last_sums, is_async=True
            )
            last_ups = warpgroup_mma(
                x, narrows.index(place + 1).permute((1, 0)), last_ups, is_async=True
            )
            sums, ups, last_sums, last_ups = warpgroup_mma_wait(
                0, deps=[sums, ups, last_sums, last_ups]
            )
        else:
            sums, ups = warpgroup_mma_wait(0, deps=[sums, ups])
        gl.thread_barrier()  # both warp groups have read the stage
        block, is_there = begin + i + NUM_STAGES, i + NUM_STAGES < count
        mbarrier.expect(full.index(stage), BYTES, pred=is_there)
        _bring_weights(
            wide_tiles, narrow_tiles, wides, narrows, full.index(stage), block, stage, first,
            half_stride, is_there, WIDE, NARROW, BLOCK_K,
        )  # fmt: skip
        tma.async_copy_global_to_shared(
            x_tiles, [0, block * BLOCK_K], full.index(stage), xs.index(stage), pred=is_there
        )
    own = out + gl.program_id(1) * part_stride
    _store_halves(
        own, sums, ups, first, num_rows, N, out_stride, dtype, HALF, ACTIVATION, BY_ROWS, ROWS,
        WIDE, L_WIDE,
    )  # fmt: skip
    if NARROW > 0:
        _store_halves(
            own, last_sums, last_ups, first + WIDE, num_rows, N, out_stride, dtype, HALF,
            ACTIVATION, BY_ROWS, ROWS, LAST, L_LAST,
        )  # fmt: skip


def can_stream(x_TK: Tensor, weight_NK: Tensor) -> bool:
    """Return whether the kernel serves these arguments on their device."""
    return (
        runs_hopper_kernels(x_TK.device)
        and 0 < x_TK.shape[0] <= _ROWS
        and x_TK.shape[1] % K_STEP == 0
        and all(can_copy(matrix) for matrix in (x_TK, weight_NK))
    )


def stream_parts(parts_PTN: Tensor, x_TK: Tensor, weight_NK: Tensor, tile: StreamTile) -> None:
    """See the door of `skinny_linear_parts`; arguments such that `can_stream`."""
    num_parts, num_rows, num_outputs = parts_PTN.shape
    grid = cdiv(num_outputs, 2 * tile.half), num_parts
    _launch(parts_PTN, num_outputs, num_rows * num_outputs, x_TK, weight_NK, _PLAIN, tile, grid)


def stream_gated(
    out_TI: Tensor, x_TK: Tensor, weight_2IK: Tensor, activation: str, tile: StreamTile
) -> None:
    """See the door of `skinny_gated_linear`; arguments such that `can_stream`, no bias."""
    grid = cdiv(out_TI.shape[1], tile.half), 1
    _launch(out_TI, out_TI.stride(0), 0, x_TK, weight_2IK, activation, tile, grid)


def _launch(
    out: Tensor,
    out_stride: int,
    part_stride: int,
    x_TK: Tensor,
    weight: Tensor,
    activation: str,
    tile: StreamTile,
    grid: tuple[int, int],
) -> None:
    (num_rows, k), num_outputs = x_TK.shape, out.shape[-1]
    num_blocks = cdiv(k, tile.block_k)
    wide_tiles = describe_tiles(weight, tile.wide, tile.block_k)
    _stream_kernel[grid](
        out,
        describe_tiles(x_TK, _ROWS, tile.block_k),
        wide_tiles,
        describe_tiles(weight, tile.narrow, tile.block_k) if tile.narrow else wide_tiles,
        num_rows,
        num_outputs,
        out_stride,
        part_stride,
        num_blocks,
        cdiv(num_blocks, grid[1]),
        ACTIVATION=activation,
        BY_ROWS=num_rows > FEW_ROWS,
        ROWS=_ROWS,
        WIDE=tile.wide,
        NARROW=tile.narrow,
        BLOCK_K=tile.block_k,
        NUM_STAGES=tile.num_stages,
        num_warps=8,
        launch_pdl=True,
    )
