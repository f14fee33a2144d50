"""What the warps of the Hopper kernel of the delta rule do: one brings tiles, four compute.

Called by `delta_hopper.py`, inside of its kernel only. The warp group holds some columns of a
head's state and takes them from chunk to chunk; four products depend on each other there, so that
what is left of time is spent waiting: everything that needs no state was made before, and the copy
engine brings it ahead.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vllm._custom_ops.triton.state_hopper import clear_behind, find_item


@gluon.jit
def bring_chunks(
    tiles,
    places,
    memory,
    bars,
    num_items,
    q_head,
    k_head,
    SHARE: gl.constexpr,
    HEADS: gl.constexpr,
    PARTS: gl.constexpr,
    KEY: gl.constexpr,
    VALUE: gl.constexpr,
    BLOCK_V: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """What one warp does: bring the tiles of all chunks, as far ahead as there is memory."""
    solved_tiles, change_tiles, query_tiles, score_tiles, key_tiles = tiles
    solved, changes, queries, scores, keys = memory
    tile_full, tile_free = bars
    cu_query_lens, num_computed = places
    num_brought = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        part, _, begin, _, num_chunks, _, _ = find_item(
            item, cu_query_lens, num_computed, HEADS * PARTS, CHUNK
        )
        head = part // PARTS
        column = head * VALUE + part % PARTS * BLOCK_V
        for i in range(num_chunks):
            first = begin + i * CHUNK
            stage = num_brought % NUM_STAGES
            full = tile_full.index(stage)
            mbarrier.wait(tile_free.index(stage), (num_brought // NUM_STAGES & 1) ^ 1)
            mbarrier.expect(full, CHUNK * (3 * KEY + CHUNK + BLOCK_V) * 2)
            tma.async_copy_global_to_shared(
                solved_tiles, [first, head * KEY], full, solved.index(stage)
            )
            tma.async_copy_global_to_shared(
                change_tiles, [first, column], full, changes.index(stage)
            )
            tma.async_copy_global_to_shared(
                query_tiles, [first, head // SHARE * q_head], full, queries.index(stage)
            )
            tma.async_copy_global_to_shared(
                score_tiles, [first, head * CHUNK], full, scores.index(stage)
            )
            tma.async_copy_global_to_shared(
                key_tiles, [first, head // SHARE * k_head], full, keys.index(stage)
            )
            num_brought += 1


@gluon.jit
def _load_factors(of_tokens, is_token, width):
    """Load what queries and changes of a chunk are multiplied with, see the first kernel."""
    of_query = gl.load(of_tokens, mask=is_token, other=0.0)
    of_change = gl.load(of_tokens + width, mask=is_token, other=0.0)
    of_own = gl.load(of_tokens + 2 * width, mask=is_token, other=0.0)
    return of_query, of_change, of_own


@gluon.jit
def carry_state(
    out,
    state,
    state_offsets,
    factors,
    kept,
    places,
    memory,
    own_memory,
    bars,
    num_items,
    num_tokens,
    num_places,
    out_stride,
    out_head,
    unit_stride,
    offset_stride,
    HEADS: gl.constexpr,
    PARTS: gl.constexpr,
    KEY: gl.constexpr,
    VALUE: gl.constexpr,
    BLOCK_V: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """What a warp group does: take BLOCK_V columns of a head's state through a row."""
    solved, changes, queries, scores, keys = memory
    old, changed = own_memory  # operands: the state; changes as they are and as the state gets them
    tile_full, tile_free = bars
    cu_query_lens, num_computed = places
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    dtype: gl.constexpr = old.dtype
    rows = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, BLOCK_V, layout=gl.SliceLayout(0, LAYOUT))
    numbers = gl.arange(0, KEY, layout=gl.SliceLayout(1, LAYOUT))
    inside = numbers[:, None] * VALUE + columns[None, :]
    nothing = gl.zeros((CHUNK, BLOCK_V), gl.float32, layout=LAYOUT)
    width = HEADS * num_tokens
    num_done = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        part, row, begin, end, num_chunks, place, computed = find_item(
            item, cu_query_lens, num_computed, HEADS * PARTS, CHUNK
        )
        if num_chunks > 0:
            head = part // PARTS
            offset = part % PARTS * BLOCK_V
            unit = gl.load(state_offsets + row * offset_stride).to(gl.int64)
            own = state + unit * unit_stride + (head * (KEY * VALUE) + offset) + inside
            carried = gl.load(own, mask=(inside >= 0) & (computed > 0), other=0.0).to(gl.float32)
            of_tokens = factors + (head * num_tokens + begin) + rows
            of_query, of_change, of_own = _load_factors(of_tokens, rows < end - begin, width)
            of_chunk = kept + (head * num_places + place)
            fade = gl.load(of_chunk)
            for i in range(num_chunks):
                stage = num_done % NUM_STAGES
                first = begin + i * CHUNK
                left = end - first
                is_token = rows < left
                old.store(carried.to(dtype))
                fence_async_shared()
                mbarrier.wait(tile_full.index(stage), num_done // NUM_STAGES & 1)
                query = queries.index(stage)
                change = changes.index(stage).load(LAYOUT).to(gl.float32)
                change = warpgroup_mma(solved.index(stage), old, change, is_async=True)
                read = warpgroup_mma(query, old, nothing, use_acc=False, is_async=True)
                change = warpgroup_mma_wait(1, deps=[change])
                change = gl.where(is_token[:, None], change, 0.0)
                changed.index(0).store(change.to(dtype))
                changed.index(1).store((change * of_change[:, None]).to(dtype))
                read = warpgroup_mma_wait(0, deps=[read])
                if (i == 0) & (computed > 0):  # a state may be far larger than what follows
                    gl.thread_barrier()  # the other warps' products have read it too
                    rest = carried - carried.to(dtype).to(gl.float32)
                    old.store(rest.to(dtype))
                    fence_async_shared()
                    read = warpgroup_mma(query, old, read, is_async=True)
                    read = warpgroup_mma_wait(0, deps=[read])
                if left < CHUNK:
                    clear_behind(keys.index(stage), left, CHUNK, KEY)
                fence_async_shared()
                key = keys.index(stage).permute((1, 0))
                carried = carried * fade
                carried = warpgroup_mma(key, changed.index(1), carried, is_async=True)
                read = gl.fma(read, of_query[:, None], change * of_own[:, None])
                read = warpgroup_mma(scores.index(stage), changed.index(0), read, is_async=True)
                if i + 1 < num_chunks:  # what the next chunk wants is on its way meanwhile
                    of_tokens += CHUNK
                    of_chunk += 1
                    is_next = rows < left - CHUNK
                    of_query, of_change, of_own = _load_factors(of_tokens, is_next, width)
                    fade = gl.load(of_chunk)
                carried, read = warpgroup_mma_wait(0, deps=[carried, read])
                mbarrier.arrive(tile_free.index(stage), count=1)
                token = (first + rows).to(gl.int64) * out_stride
                results = out + token[:, None] + (head * out_head + offset + columns)[None, :]
                gl.store(results, read.to(dtype), mask=is_token[:, None])
                num_done += 1
            gl.store(own, carried.to(state.dtype.element_ty))
