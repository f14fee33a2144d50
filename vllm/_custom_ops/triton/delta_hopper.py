"""The second kernel of the gated delta rule over prompts by Hopper's own means.

Called by `delta_chunks.py` where `can_pass`: keys and values of 128, operands of 16 bits. Each
program takes one (row, head, columns) after the other through all its chunks; `delta_warps.py` says
what its warps do. Written in Gluon, since Triton miscompiles chunks to products of warp groups
(`tensor_cores.py`). The arithmetic, and where it rounds, is that of `delta_chunks.py`, whose bits
it gives on an H200.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from vllm._custom_ops.triton.copy_engine import can_copy, describe_tiles, runs_hopper_kernels
from vllm._custom_ops.triton.delta_warps import bring_chunks, carry_state
from vllm._custom_ops.triton.device import count_processors
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.state_rows import ROW_TABLES

_SIZE = 128  # of keys and values
_COLUMNS = (32, 64)  # of a state in a program; 64 take half the traffic, and twice the time
_NUM_STAGES = 2  # chunks whose tiles are in flight
_CHUNK = 64


@fast_launch
@gluon.jit(
    do_not_specialize=["num_items", "num_tokens", "num_places"],
    do_not_specialize_on_alignment=ROW_TABLES,
)
def _delta_hopper_kernel(
    out,
    state,
    solved_tiles,
    change_tiles,
    query_tiles,
    score_tiles,
    key_tiles,
    factors,
    kept,
    state_offsets,
    cu_query_lens,
    num_computed,
    num_items,
    num_tokens,
    num_places,
    out_stride,
    out_head,
    q_head,
    k_head,
    unit_stride,
    offset_stride,
    HEADS: gl.constexpr,
    SHARE: gl.constexpr,
    KEY: gl.constexpr,
    VALUE: gl.constexpr,
    BLOCK_V: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """Items program_id, program_id + num_programs …: a head of a row, BLOCK_V of its columns."""
    dtype: gl.constexpr = query_tiles.dtype
    PARTS: gl.constexpr = VALUE // BLOCK_V
    OLD: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEY, BLOCK_V], dtype)
    solved = gl.allocate_shared_memory(dtype, [NUM_STAGES, CHUNK, KEY], solved_tiles.layout)
    changes = gl.allocate_shared_memory(dtype, [NUM_STAGES, CHUNK, BLOCK_V], change_tiles.layout)
    queries = gl.allocate_shared_memory(dtype, [NUM_STAGES, CHUNK, KEY], query_tiles.layout)
    scores = gl.allocate_shared_memory(dtype, [NUM_STAGES, CHUNK, CHUNK], score_tiles.layout)
    keys = gl.allocate_shared_memory(dtype, [NUM_STAGES, CHUNK, KEY], key_tiles.layout)
    old = gl.allocate_shared_memory(dtype, [KEY, BLOCK_V], OLD)
    changed = gl.allocate_shared_memory(dtype, [2, CHUNK, BLOCK_V], change_tiles.layout)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    tile_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BAR)
    tile_free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BAR)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(tile_full.index(i), count=1)
        mbarrier.init(tile_free.index(i), count=1)
    fence_async_shared()
    tiles = (solved_tiles, change_tiles, query_tiles, score_tiles, key_tiles)
    memory = (solved, changes, queries, scores, keys)
    places = (cu_query_lens, num_computed)
    bars = (tile_full, tile_free)
    gl.warp_specialize(
        [
            (carry_state, (
                out, state, state_offsets, factors, kept, places, memory, (old, changed), bars,
                num_items, num_tokens, num_places, out_stride, out_head, unit_stride,
                offset_stride, HEADS, PARTS, KEY, VALUE, BLOCK_V, NUM_STAGES, CHUNK,
            )),
            (bring_chunks, (
                tiles, places, memory, bars, num_items, q_head, k_head, SHARE, HEADS, PARTS, KEY,
                VALUE, BLOCK_V, NUM_STAGES, CHUNK,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


def can_pass(out_THV: Tensor, q_THK: Tensor, k_THK: Tensor) -> bool:
    """Return whether the kernel serves these arguments on their device."""
    return (
        runs_hopper_kernels(q_THK.device)
        and q_THK.shape[2] == _SIZE
        and out_THV.shape[2] == _SIZE
        and can_copy(q_THK)
        and can_copy(k_THK)
    )


def run_pass(
    out_THV: Tensor,
    made: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    q_THK: Tensor,
    k_THK: Tensor,
    state: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Take the states through all chunks and write the outputs.

    Args:
        out_THV: such that `can_pass` with queries and keys.
        made: what the first kernel wrote, see there.
        rows: offsets of the states, cu_query_lens, num_computed.
    """
    by_state, by_value, attention, factors, kept = made
    num_tokens, num_heads, value_size = out_THV.shape
    key_size = q_THK.shape[2]
    num_processors = count_processors(q_THK.device)
    num_states = rows[0].shape[0] * num_heads
    narrow, wide = _COLUMNS
    block_v = narrow if num_states * (value_size // narrow) <= num_processors else wide
    num_items = num_states * (value_size // block_v)
    _delta_hopper_kernel[(min(num_items, num_processors),)](
        out_THV,
        state,
        describe_tiles(by_state, _CHUNK, key_size),
        describe_tiles(by_value, _CHUNK, block_v),
        describe_tiles(q_THK, _CHUNK, key_size),
        describe_tiles(attention, _CHUNK, _CHUNK),
        describe_tiles(k_THK, _CHUNK, key_size),
        factors,
        kept,
        *rows,
        num_items,
        num_tokens,
        kept.shape[1],
        *out_THV.stride()[:2],
        q_THK.stride(1),
        k_THK.stride(1),
        state.stride(0),
        rows[0].stride(0),
        HEADS=num_heads,
        SHARE=num_heads // q_THK.shape[1],
        KEY=key_size,
        VALUE=value_size,
        BLOCK_V=block_v,
        NUM_STAGES=_NUM_STAGES,
        CHUNK=_CHUNK,
        num_warps=4,
    )
