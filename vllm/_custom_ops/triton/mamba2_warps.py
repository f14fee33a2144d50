"""What the warps of the Hopper kernel of Mamba-2 do: one brings tiles, groups of four compute.

Called by `mamba2_hopper.py`, inside of its kernel only. One warp group carries a head's state from
chunk to chunk and leaves in shared memory what each begins with; others take turns to read it, add
what tokens of the chunk give each other, and write the outputs. The copy engine fills tiles of x, B
and C ahead of all, and takes whole tiles of outputs away.
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

_MAX_POWER = gl.constexpr(126.0)  # 2 to it is finite


@gluon.jit
def bring_chunks(
    tiles,
    places,
    memory,
    bars,
    num_items,
    x_head,
    b_group,
    c_group,
    HEADS: gl.constexpr,
    SHARE: gl.constexpr,
    SIZE: gl.constexpr,
    STATE: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """What one warp does: bring the tiles of all chunks, as far ahead as there is memory."""
    value_tiles, key_tiles, query_tiles = tiles
    values, keys, queries = memory
    tile_full, tile_free = bars
    cu_query_lens, num_computed = places
    num_brought = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        head, _, begin, _, num_chunks, _, _ = find_item(
            item, cu_query_lens, num_computed, HEADS, CHUNK
        )
        group = head // SHARE
        for i in range(num_chunks):
            first = begin + i * CHUNK
            stage = num_brought % NUM_STAGES
            full = tile_full.index(stage)
            mbarrier.wait(tile_free.index(stage), (num_brought // NUM_STAGES & 1) ^ 1)
            mbarrier.expect(full, CHUNK * (SIZE + 2 * STATE) * 2)
            tma.async_copy_global_to_shared(
                query_tiles, [first, group * c_group], full, queries.index(stage)
            )
            tma.async_copy_global_to_shared(
                key_tiles, [first, group * b_group], full, keys.index(stage)
            )
            tma.async_copy_global_to_shared(
                value_tiles, [first, head * x_head], full, values.index(stage)
            )
            num_brought += 1


@gluon.jit
def carry_state(
    state,
    state_offsets,
    decays,
    places,
    memory,
    bars,
    num_items,
    unit_stride,
    offset_stride,
    HEADS: gl.constexpr,
    SIZE: gl.constexpr,
    STATE: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """What a warp group does: keep what each chunk begins with, and take the state through it."""
    values, keys, kept = memory
    tile_full, tile_free, state_full, state_free = bars
    cu_query_lens, num_computed = places
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STATE, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    dtype: gl.constexpr = values.dtype
    at = gl.arange(0, SIZE, layout=gl.SliceLayout(1, LAYOUT))
    numbers = gl.arange(0, STATE, layout=gl.SliceLayout(0, LAYOUT))
    chunk_at = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, OPERAND))
    inside = at[:, None] * STATE + numbers[None, :]
    num_done = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        head, row, begin, end, num_chunks, place, computed = find_item(
            item, cu_query_lens, num_computed, HEADS, CHUNK
        )
        if num_chunks > 0:
            unit = gl.load(state_offsets + row * offset_stride).to(gl.int64)
            own = state + unit * unit_stride + head * (SIZE * STATE) + inside
            carried = gl.load(own, mask=(inside >= 0) & (computed > 0), other=0.0).to(gl.float32)
            of_chunk = decays + (place * HEADS + head) * (2 * CHUNK)
            total = gl.load(of_chunk + (CHUNK - 1))
            source = gl.load(of_chunk + CHUNK + chunk_at)
            for i in range(num_chunks):
                stage = num_done % NUM_STAGES
                buffer = num_done % 2
                mbarrier.wait(state_free.index(buffer), (num_done // 2 & 1) ^ 1)
                kept.index(buffer).store(carried.to(dtype))
                fence_async_shared()
                mbarrier.arrive(state_full.index(buffer), count=1)
                weight = gl.exp2(total - source)
                fade = gl.exp2(total)
                if i + 1 < num_chunks:  # what the next chunk wants is on its way meanwhile
                    of_chunk += HEADS * 2 * CHUNK
                    total = gl.load(of_chunk + (CHUNK - 1))
                    source = gl.load(of_chunk + CHUNK + chunk_at)
                mbarrier.wait(tile_full.index(stage), num_done // NUM_STAGES & 1)
                left = end - begin - i * CHUNK
                if left < CHUNK:
                    clear_behind(values.index(stage), left, CHUNK, SIZE)
                    clear_behind(keys.index(stage), left, CHUNK, STATE)
                value = values.index(stage).permute((1, 0)).load(OPERAND).to(gl.float32)
                value = (value * weight[None, :]).to(dtype)
                carried = carried * fade
                carried = warpgroup_mma(value, keys.index(stage), carried, is_async=True)
                carried = warpgroup_mma_wait(0, deps=[carried])
                mbarrier.arrive(tile_free.index(stage), count=1)
                num_done += 1
            gl.store(own, carried.to(state.dtype.element_ty))


@gluon.jit
def read_states(
    PART: gl.constexpr,
    out,
    out_tiles,
    decays,
    skip,
    places,
    memory,
    bars,
    num_items,
    out_stride,
    out_head,
    HAS_SKIP: gl.constexpr,
    HEADS: gl.constexpr,
    SIZE: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    NUM_READERS: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """What a warp group does: the outputs of every NUM_READERS-th chunk through all items."""
    values, keys, queries, kept, written = memory
    tile_full, tile_free, state_full, state_free = bars
    cu_query_lens, num_computed = places
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    READ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, READ, 2)
    dtype: gl.constexpr = values.dtype
    tokens = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))
    others = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, LAYOUT))
    rows = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, READ))
    at = gl.arange(0, SIZE, layout=gl.SliceLayout(0, READ))
    is_past = tokens[:, None] >= others[None, :]
    none = gl.zeros((CHUNK, CHUNK), gl.float32, layout=LAYOUT)
    nothing = gl.zeros((CHUNK, SIZE), gl.float32, layout=READ)
    num_before = 0  # chunks of the items before
    num_written = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        head, _, begin, end, num_chunks, place, _ = find_item(
            item, cu_query_lens, num_computed, HEADS, CHUNK
        )
        if num_chunks > 0:
            start = (PART + NUM_READERS - num_before % NUM_READERS) % NUM_READERS
            of_chunk = decays + (place * HEADS + head) * (2 * CHUNK)
            of_chunk += gl.minimum(start, num_chunks - 1) * (HEADS * 2 * CHUNK)
            decay = gl.load(of_chunk + tokens)
            source = gl.load(of_chunk + CHUNK + others)
            own_skip = 0.0
            if HAS_SKIP:
                own_skip = gl.load(skip + head)
            for i in range(start, num_chunks, NUM_READERS):
                num_done = num_before + i
                stage = num_done % NUM_STAGES
                buffer = num_done % 2
                first = begin + i * CHUNK
                left = end - first
                query = queries.index(stage)
                value = values.index(stage)
                mbarrier.wait(tile_full.index(stage), num_done // NUM_STAGES & 1)
                products = warpgroup_mma(
                    query, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True
                )
                mbarrier.wait(state_full.index(buffer), num_done // 2 & 1)
                state = kept.index(buffer).permute((1, 0))
                read = warpgroup_mma(query, state, nothing, use_acc=False, is_async=True)
                weight = gl.exp2(gl.minimum(decay[:, None] - source[None, :], _MAX_POWER))
                fade = gl.convert_layout(gl.exp2(decay), gl.SliceLayout(1, READ))
                if i + NUM_READERS < num_chunks:  # what the next one wants is on its way meanwhile
                    of_chunk += NUM_READERS * HEADS * 2 * CHUNK
                    decay = gl.load(of_chunk + tokens)
                    source = gl.load(of_chunk + CHUNK + others)
                products = warpgroup_mma_wait(1, deps=[products])
                # What comes later has no product, so that its weight may be anything finite.
                products = gl.where(is_past, products, 0.0) * weight
                products = gl.convert_layout(products.to(dtype), OPERAND)
                read = warpgroup_mma_wait(0, deps=[read])
                mbarrier.arrive(state_free.index(buffer), count=1)
                if left < CHUNK:
                    clear_behind(value, left, CHUNK, SIZE)
                read = read * fade[:, None]
                read = warpgroup_mma(products, value, read, is_async=True)
                if HAS_SKIP:
                    own = value.load(READ).to(gl.float32) * own_skip
                    read = warpgroup_mma_wait(0, deps=[read]) + own
                else:
                    read = warpgroup_mma_wait(0, deps=[read])
                mbarrier.arrive(tile_free.index(stage), count=1)
                if left < CHUNK:
                    token = (first + rows).to(gl.int64) * out_stride
                    results = out + token[:, None] + (head * out_head + at)[None, :]
                    gl.store(results, read.to(dtype), mask=(rows < left)[:, None])
                else:
                    target = written.index(2 * PART + num_written % 2)
                    tma.store_wait(1)  # what lay there has left
                    target.store(read.to(dtype))
                    fence_async_shared()
                    tma.async_copy_shared_to_global(out_tiles, [first, head * out_head], target)
                    num_written += 1
            num_before += num_chunks
    tma.store_wait(0)
