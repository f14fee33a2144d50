"""The Mamba-2 scan over prompts by Hopper's own means: its copy engine, products of warp groups.

Called by `mamba2.py` where `can_walk`. Each program takes one (row, head) after the other through
all its chunks and writes their outputs on the way, so that states of chunks, two thirds of what
`mamba2_chunks.py` moves, never leave a processor; `mamba2_warps.py` says what its warps do. Written
in Gluon, since Triton miscompiles chunks to such products (`tensor_cores.py`). The arithmetic, and
where it rounds, is that of `mamba2_chunks.py`, whose bits it gives on an H200.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from vllm._custom_ops.triton.copy_engine import can_copy, describe_tiles, runs_hopper_kernels
from vllm._custom_ops.triton.device import count_processors
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.mamba2_chunks import CHUNK, Scan, make_decays
from vllm._custom_ops.triton.mamba2_warps import bring_chunks, carry_state, read_states
from vllm._custom_ops.triton.state_rows import ROW_TABLES

MIN_WALKS = 32
"""Rows times heads; each takes its time, and fewer are outrun by walks over halves of heads."""

_SIZE = 64  # rows of a warp group's product
_STATE_SIZES = (64, 128)
NUM_READERS = 2
"""Warp groups that write outputs. Alone one is level (168 us for 8,192 tokens, two take 172);
between products two were ahead twice, by 93 and 140 us a layer, hardly more than a run varies."""

_REGISTERS = 160  # of a thread that computes
_NUM_STAGES = 2  # chunks whose tiles are in flight: 144 KB of shared memory with the rest


@fast_launch
@gluon.jit(do_not_specialize=["num_items"], do_not_specialize_on_alignment=ROW_TABLES)
def _mamba_hopper_kernel(
    out,
    out_tiles,
    value_tiles,
    key_tiles,
    query_tiles,
    decays,
    skip,
    state,
    state_offsets,
    cu_query_lens,
    num_computed,
    num_items,
    out_stride,
    out_head,
    x_head,
    b_group,
    c_group,
    unit_stride,
    offset_stride,
    HEADS: gl.constexpr,
    SHARE: gl.constexpr,
    SIZE: gl.constexpr,
    STATE: gl.constexpr,
    HAS_SKIP: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    NUM_READERS: gl.constexpr,
    CHUNK: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Items program_id, program_id + num_programs …, a head of a row each."""
    dtype: gl.constexpr = value_tiles.dtype
    KEPT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIZE, STATE], dtype)
    values = gl.allocate_shared_memory(dtype, [NUM_STAGES, CHUNK, SIZE], value_tiles.layout)
    keys = gl.allocate_shared_memory(dtype, [NUM_STAGES, CHUNK, STATE], key_tiles.layout)
    queries = gl.allocate_shared_memory(dtype, [NUM_STAGES, CHUNK, STATE], query_tiles.layout)
    kept = gl.allocate_shared_memory(dtype, [2, SIZE, STATE], KEPT)
    written = gl.allocate_shared_memory(dtype, [2 * NUM_READERS, CHUNK, SIZE], out_tiles.layout)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    tile_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BAR)
    tile_free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BAR)
    state_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    state_free = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(tile_full.index(i), count=1)
        mbarrier.init(tile_free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(state_full.index(i), count=1)
        mbarrier.init(state_free.index(i), count=1)
    fence_async_shared()
    places = (cu_query_lens, num_computed)
    bars = (tile_full, tile_free, state_full, state_free)
    read_memory = (values, keys, queries, kept, written)
    gl.warp_specialize(
        [
            (read_states, (
                gl.constexpr(0), out, out_tiles, decays, skip, places, read_memory, bars, num_items,
                out_stride, out_head, HAS_SKIP, HEADS, SIZE, NUM_STAGES, NUM_READERS, CHUNK,
            )),
            (read_states, (
                gl.constexpr(1), out, out_tiles, decays, skip, places, read_memory, bars, num_items,
                out_stride, out_head, HAS_SKIP, HEADS, SIZE, NUM_STAGES, NUM_READERS, CHUNK,
            )),
            (carry_state, (
                state, state_offsets, decays, places, (values, keys, kept), bars, num_items,
                unit_stride, offset_stride, HEADS, SIZE, STATE, NUM_STAGES, CHUNK,
            )),
            (bring_chunks, (
                (value_tiles, key_tiles, query_tiles), places, (values, keys, queries),
                (tile_full, tile_free), num_items, x_head, b_group, c_group, HEADS, SHARE, SIZE,
                STATE, NUM_STAGES, CHUNK,
            )),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )  # fmt: skip


def can_walk(scan: Scan) -> bool:
    """Return whether the kernel serves these arguments on their device."""
    return (
        runs_hopper_kernels(scan.x.device)
        and scan.x.shape[2] == _SIZE
        and scan.b.shape[2] in _STATE_SIZES
        and scan.state_offsets.shape[0] * scan.x.shape[1] >= MIN_WALKS
        and all(can_copy(rows) for rows in (scan.out, scan.x, scan.b, scan.c))
    )


def walk_chunks(scan: Scan) -> None:
    """Run the scan over rows of any lengths.

    Args:
        scan: such that `can_walk`.

    Cost: scratch of two float32 a token and head; x, dt, B and C are read once from memory, B and C
    from the cache once a head.
    """
    num_heads, head_size = scan.x.shape[1:]
    state_size = scan.b.shape[2]
    decays = make_decays(scan, CHUNK)
    num_items = scan.state_offsets.shape[0] * num_heads
    _mamba_hopper_kernel[(min(num_items, count_processors(scan.x.device)),)](
        scan.out,
        describe_tiles(scan.out, CHUNK, head_size),
        describe_tiles(scan.x, CHUNK, head_size),
        describe_tiles(scan.b, CHUNK, state_size),
        describe_tiles(scan.c, CHUNK, state_size),
        decays,
        scan.skip,
        scan.state,
        scan.state_offsets,
        scan.cu_query_lens,
        scan.lens,
        num_items,
        *scan.out.stride()[:2],
        scan.x.stride(1),
        scan.b.stride(1),
        scan.c.stride(1),
        scan.state.stride(0),
        scan.state_offsets.stride(0),
        HEADS=num_heads,
        SHARE=num_heads // scan.b.shape[1],
        SIZE=head_size,
        STATE=state_size,
        HAS_SKIP=scan.skip is not None,
        NUM_STAGES=_NUM_STAGES,
        NUM_READERS=NUM_READERS,
        CHUNK=CHUNK,
        REGISTERS=_REGISTERS,
        num_warps=4,
    )
