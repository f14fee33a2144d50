"""What the warps of the Hopper kernel of prompts do: one brings tiles, two groups of four compute.

Called by `attention_hopper.py`, inside of its kernel only. The copy engine fills tiles of keys and
values ahead of their use; a warp group multiplies its queries by the next keys, and its weights by
the last values, while it computes weights (Shah et al., "FlashAttention-3", 2024). Both groups
share each tile of keys: they serve two heads of one KV head, or two query tiles of one head.

Tiles of queries and of keys stand at multiples of their length in the sequence, so that a query
meets the same tiles in the same order however its prompt was cut. The last one, which every query
sees, comes first.
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


@gluon.jit
def find_work(
    turn,
    places,
    num_items,
    num_tiles,
    window,
    NUM_GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TOKENS: gl.constexpr,
):
    """Look up the item of a program's next turn.

    Items get shorter, so that every other turn goes through the programs backwards: they end
    together.

    Returns:
        (row, group of heads, position of the first query, tiles of keys that are visited, the last
        one's index, rows of K and of the batch at position 0, first new position, length). No
        tiles are visited for what is not there.
    """
    cu_query_lens, seq_lens, cu_key_lens, _, first_row, min_query_len = places
    count, program = gl.num_programs(0), gl.program_id(0)
    item = turn * count + gl.where(turn % 2 == 0, program, count - 1 - program)
    is_there = item < num_items
    item = gl.minimum(item, num_items - 1)
    group = item % NUM_GROUPS
    tile = item // NUM_GROUPS % num_tiles
    row = item // (NUM_GROUPS * num_tiles) + first_row
    token = gl.load(cu_query_lens + row)
    query_len = gl.load(cu_query_lens + row + 1) - token
    seq_len = gl.load(seq_lens + row)
    key_row = gl.load(cu_key_lens + row + 1) - seq_len
    num_computed = seq_len - query_len
    aligned = num_computed // TOKENS * TOKENS
    num_own = (seq_len - aligned + TOKENS - 1) // TOKENS
    start = aligned + (num_own - 1 - tile) * TOKENS
    is_there &= (tile < num_own) & (query_len >= min_query_len) & (num_computed >= 0)
    last = (gl.minimum(start + TOKENS, seq_len) - 1) // BLOCK_N
    first = _first_visible(start, num_computed, window) // BLOCK_N
    num_visited = gl.where(is_there, last - first + 1, 0)
    query_row = token - num_computed
    return row, group, start, num_visited, last, key_row, query_row, num_computed, seq_len


@gluon.jit
def _first_visible(start, num_computed, window):
    """Return the first position that new queries from `start` on see."""
    return gl.maximum(gl.maximum(start, num_computed) - window + 1, 0)


@gluon.jit
def end_prefix(num_computed, seq_len, ALIGNMENT: gl.constexpr):
    """Return the position up to which rows are joined to cached ones: no tile lies across it."""
    return gl.minimum((num_computed + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, seq_len)


@gluon.jit
def _bring(
    tiles, row, column, prefix_tiles, prefix_row, is_prefix, full, free, phase, target,
    HAS_PREFIX: gl.constexpr, NUM_BYTES: gl.constexpr,
):  # fmt: skip
    """Have a tile copied once its place is free."""
    mbarrier.wait(free, phase)
    mbarrier.expect(full, NUM_BYTES)
    if HAS_PREFIX:
        if is_prefix:
            tma.async_copy_global_to_shared(prefix_tiles, [prefix_row, column], full, target)
        else:
            tma.async_copy_global_to_shared(tiles, [row, column], full, target)
    else:
        tma.async_copy_global_to_shared(tiles, [row, column], full, target)


@gluon.jit
def bring_rows(
    tiles,
    places,
    memory,
    bars,
    num_items,
    num_tiles,
    window,
    query_head_stride,
    key_head_stride,
    value_head_stride,
    HAS_PREFIX: gl.constexpr,
    ALIGNMENT: gl.constexpr,
    GROUP: gl.constexpr,
    BY_HEAD: gl.constexpr,
    NUM_GROUPS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
):
    """What one warp does: bring the tiles of all items, as far ahead as there is memory."""
    query_tiles, key_tiles, value_tiles, prefix_key_tiles, prefix_value_tiles = tiles
    queries, keys, values = memory
    query_full, query_free, key_full, key_free, value_full, value_free = bars
    TOKENS: gl.constexpr = BLOCK_M if BY_HEAD else 2 * BLOCK_M
    QUERY_BYTES: gl.constexpr = BLOCK_M * HEAD_SIZE * 2
    KEY_BYTES: gl.constexpr = BLOCK_N * HEAD_SIZE * 2
    num_done = 0
    num_brought = 0
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        (row, group, start, num_visited, last, key_row, query_row, num_computed, seq_len) = (
            find_work(turn, places, num_items, num_tiles, window, NUM_GROUPS, BLOCK_N, TOKENS)
        )
        if num_visited > 0:
            end = end_prefix(num_computed, seq_len, ALIGNMENT)
            prefix_row = gl.load(places[3] + row + 1) - end
            for part in gl.static_range(2):
                head = group * 2 + part if BY_HEAD else group
                first = query_row + start + (0 if BY_HEAD else part * BLOCK_M)
                _bring(
                    query_tiles, first, head * query_head_stride, query_tiles, 0, False,
                    query_full.index(part), query_free.index(part), (num_done & 1) ^ 1,
                    queries.index(part), False, QUERY_BYTES,
                )  # fmt: skip
            num_done += 1
            kv_head = (group * 2 if BY_HEAD else group) // GROUP
            for i in range(num_visited):
                begin = (last - i) * BLOCK_N
                stage = num_brought % NUM_STAGES
                phase = (num_brought // NUM_STAGES & 1) ^ 1
                _bring(
                    key_tiles, key_row + begin, kv_head * key_head_stride, prefix_key_tiles,
                    prefix_row + begin, begin < end, key_full.index(stage),
                    key_free.index(stage), phase, keys.index(stage), HAS_PREFIX, KEY_BYTES,
                )  # fmt: skip
                _bring(
                    value_tiles, key_row + begin, kv_head * value_head_stride, prefix_value_tiles,
                    prefix_row + begin, begin < end, value_full.index(stage),
                    value_free.index(stage), phase, values.index(stage), HAS_PREFIX, KEY_BYTES,
                )  # fmt: skip
                num_brought += 1


@gluon.jit
def _mask(logits, query_position, begin, window, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Return logits, [M, N], with -inf where a query does not see a key from `begin` on."""
    position = begin + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    distance = query_position[:, None] - position[None, :]
    return gl.where((distance >= 0) & (distance < window), logits, float("-inf"))


@gluon.jit
def _clear_rows(values, begin, first, end, BLOCK_N: gl.constexpr, HEAD_SIZE: gl.constexpr):
    """Zero the rows outside of first … end - 1, which may be NaN: weights of 0 would not hide it.

    Both warp groups may do so at once: what they write is the same.
    """
    WIDTH: gl.constexpr = 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    position = begin + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    is_own = (position >= first) & (position < end)
    for i in gl.static_range(HEAD_SIZE // WIDTH):
        part = values.slice(i * WIDTH, WIDTH, dim=1)
        rows = part.load(LAYOUT)
        part.store(gl.where(is_own[:, None], rows, gl.zeros_like(rows)))
    fence_async_shared()


@gluon.jit
def _pin(total):
    """Return what is given. The assembler lets no wait that follows come before it is computed.

    It would else wait for a product before it computes what it could compute meanwhile.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0f00000000; @p nanosleep.u32 1; mov.f32 $0, $1; }",
        "=f,f",
        [total],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def attend(
    PART: gl.constexpr,
    out,
    places,
    memory,
    bars,
    num_items,
    num_tiles,
    window,
    scale,
    out_token_stride,
    out_head_stride,
    BY_HEAD: gl.constexpr,
    NUM_GROUPS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
):
    """What a warp group does: the queries of its part of each item, with an online softmax.

    `scale` makes logits ones in units of log2.
    """
    queries, keys, values = memory
    query_full, query_free, key_full, key_free, value_full, value_free = bars
    TOKENS: gl.constexpr = BLOCK_M if BY_HEAD else 2 * BLOCK_M
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    SUMS_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    dtype: gl.constexpr = queries.dtype
    query = queries.index(PART)
    num_done = 0
    num_seen = 0
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        _, group, start, num_visited, last, _, query_row, num_computed, seq_len = find_work(
            turn, places, num_items, num_tiles, window, NUM_GROUPS, BLOCK_N, TOKENS
        )
        if num_visited > 0:
            own = start + (0 if BY_HEAD else PART * BLOCK_M)
            query_position = own + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LOGITS))
            first = _first_visible(start, num_computed, window)
            # Every query sees all of a tile that begins at lowest … highest: no mask.
            lowest, highest = own + BLOCK_M - window, own - BLOCK_N + 1
            sums = gl.zeros((BLOCK_M, HEAD_SIZE), gl.float32, layout=SUMS)
            none = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout=LOGITS)
            begin = last * BLOCK_N
            stage = num_seen % NUM_STAGES
            phase = num_seen // NUM_STAGES & 1
            mbarrier.wait(query_full.index(PART), num_done & 1)
            mbarrier.wait(key_full.index(stage), phase)
            key = keys.index(stage).permute((1, 0))
            logits = warpgroup_mma(query, key, none, use_acc=False, is_async=True)
            logits = warpgroup_mma_wait(0, deps=[logits])
            mbarrier.arrive(key_free.index(stage), count=1)
            logits = _mask(logits, query_position, begin, window, BLOCK_N, LOGITS)
            biggest = gl.max(logits, 1)
            base = gl.where(biggest == float("-inf"), 0.0, biggest * scale)
            weights = gl.exp2(logits * scale - base[:, None])
            total = gl.sum(weights, 1)
            weights = gl.convert_layout(weights.to(dtype), WEIGHTS)
            for i in range(1, num_visited):
                before = stage
                before_phase = phase
                before_begin = begin
                num_seen += 1
                begin = (last - i) * BLOCK_N
                stage = num_seen % NUM_STAGES
                phase = num_seen // NUM_STAGES & 1
                mbarrier.wait(value_full.index(before), before_phase)
                value = values.index(before)
                if before_begin + BLOCK_N > seq_len:
                    _clear_rows(value, before_begin, first, seq_len, BLOCK_N, HEAD_SIZE)
                mbarrier.wait(key_full.index(stage), phase)
                key = keys.index(stage).permute((1, 0))
                logits = warpgroup_mma(query, key, none, use_acc=False, is_async=True)
                sums = warpgroup_mma(weights, value, sums, is_async=True)
                logits = warpgroup_mma_wait(1, deps=[logits])
                mbarrier.arrive(key_free.index(stage), count=1)
                if (begin > highest) | (begin < lowest):
                    logits = _mask(logits, query_position, begin, window, BLOCK_N, LOGITS)
                grown = gl.maximum(biggest, gl.max(logits, 1))
                base = gl.where(grown == float("-inf"), 0.0, grown * scale)
                fresh = gl.exp2(logits * scale - base[:, None])
                factor = gl.exp2(biggest * scale - base)
                biggest = grown
                total = _pin(total * factor + gl.sum(fresh, 1))
                sums, fresh, factor, total = warpgroup_mma_wait(
                    0, deps=[sums, fresh, factor, total]
                )
                mbarrier.arrive(value_free.index(before), count=1)
                sums = sums * gl.convert_layout(factor, SUMS_ROW)[:, None]
                weights = gl.convert_layout(fresh.to(dtype), WEIGHTS)
            num_seen += 1
            num_done += 1
            mbarrier.arrive(query_free.index(PART), count=1)
            mbarrier.wait(value_full.index(stage), phase)
            value = values.index(stage)
            if (begin < first) | (begin + BLOCK_N > seq_len):
                _clear_rows(value, begin, first, seq_len, BLOCK_N, HEAD_SIZE)
            sums = warpgroup_mma(weights, value, sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(value_free.index(stage), count=1)
            total = gl.where(total == 0.0, 1.0, total)  # of rows that are not there
            read = sums / gl.convert_layout(total, SUMS_ROW)[:, None]
            position = own + gl.arange(0, BLOCK_M, layout=SUMS_ROW)
            element = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, SUMS))
            head = group * 2 + PART if BY_HEAD else group
            row = (query_row + position).to(gl.int64)
            is_new = (position >= num_computed) & (position < seq_len)
            rows = out + row * out_token_stride + head * out_head_stride
            gl.store(rows[:, None] + element[None, :], read.to(dtype), mask=is_new[:, None])
