"""Attention of prompts by Hopper's own means: its copy engine and its products of warp groups.

Called by `attention_prefill.py` where rows of K and V lie behind each other: new ones where they
are, cached ones joined before them. Each program takes one (query tile, heads, row) after the
other; `attention_warps.py` says what its warps do. Written in Gluon, Triton's language for what its
compiler does not find by itself. Other GPUs and other masks are served by the kernel of
`attention_prefill.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from vllm._custom_ops.triton.attention_args import AttentionArgs, PrefixRows
from vllm._custom_ops.triton.attention_shape import PREFIX_ALIGNMENT
from vllm._custom_ops.triton.attention_warps import attend, bring_rows
from vllm._custom_ops.triton.copy_engine import can_copy, describe_tiles, runs_hopper_kernels
from vllm._custom_ops.triton.device import count_processors
from vllm._custom_ops.triton.launch import fast_launch
from vllm.utils.math import cdiv

MIN_TOKENS = 64
"""Of the longest row; fewer fill no tile."""

_HEAD_SIZES = (64, 128, 256)
_BLOCK_M = 64  # rows of a warp group's product
_REGISTERS = 240  # of a thread that computes; the sums fill half of them
_NUM_STAGES = 2  # tiles of keys, and of values, that are on their way or in use
_LOG2_E = 1.4426950408889634


@fast_launch
@gluon.jit(
    do_not_specialize=["window", "first_row", "min_query_len", "num_items", "num_tiles"],
)
def _hopper_kernel(
    out,
    query_tiles,
    key_tiles,
    value_tiles,
    prefix_key_tiles,
    prefix_value_tiles,
    cu_query_lens,
    seq_lens,
    cu_key_lens,
    cu_prefix_lens,
    scale,
    window,
    first_row,
    min_query_len,
    num_items,
    num_tiles,
    out_token_stride,
    out_head_stride,
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
    REGISTERS: gl.constexpr,
):
    """Items program_id, program_id + num_programs …; the last tiles of a row come first."""
    dtype: gl.constexpr = query_tiles.dtype
    TILE: gl.constexpr = key_tiles.layout
    queries = gl.allocate_shared_memory(dtype, [2, BLOCK_M, HEAD_SIZE], query_tiles.layout)
    keys = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_N, HEAD_SIZE], TILE)
    values = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_N, HEAD_SIZE], TILE)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    query_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    query_free = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    key_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BAR)
    key_free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BAR)
    value_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BAR)
    value_free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BAR)
    for i in gl.static_range(2):
        mbarrier.init(query_full.index(i), count=1)
        mbarrier.init(query_free.index(i), count=1)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(key_full.index(i), count=1)
        mbarrier.init(key_free.index(i), count=2)
        mbarrier.init(value_full.index(i), count=1)
        mbarrier.init(value_free.index(i), count=2)
    fence_async_shared()
    tiles = (query_tiles, key_tiles, value_tiles, prefix_key_tiles, prefix_value_tiles)
    places = (
        cu_query_lens, seq_lens, cu_key_lens, cu_prefix_lens, first_row, min_query_len,
    )  # fmt: skip
    memory = (queries, keys, values)
    bars = (query_full, query_free, key_full, key_free, value_full, value_free)
    gl.warp_specialize(
        [
            (attend, (
                gl.constexpr(0), out, places, memory, bars, num_items, num_tiles, window, scale,
                out_token_stride, out_head_stride, BY_HEAD, NUM_GROUPS, NUM_STAGES, BLOCK_M,
                BLOCK_N, HEAD_SIZE,
            )),
            (attend, (
                gl.constexpr(1), out, places, memory, bars, num_items, num_tiles, window, scale,
                out_token_stride, out_head_stride, BY_HEAD, NUM_GROUPS, NUM_STAGES, BLOCK_M,
                BLOCK_N, HEAD_SIZE,
            )),
            (bring_rows, (
                tiles, places, memory, bars, num_items, num_tiles, window, query_head_stride,
                key_head_stride, value_head_stride, HAS_PREFIX, ALIGNMENT, GROUP, BY_HEAD,
                NUM_GROUPS, NUM_STAGES, BLOCK_M, BLOCK_N, HEAD_SIZE,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def can_attend(args: AttentionArgs) -> bool:
    """Return whether the kernel serves these arguments on their device, once no cache is read."""
    key, value, head_size = args.fresh_key, args.fresh_value, args.query.shape[2]
    return (
        key is not None
        and value is not None
        and runs_hopper_kernels(args.query.device)
        and key.dtype == value.dtype == args.query.dtype
        and key.shape == value.shape
        and head_size in _HEAD_SIZES
        and args.out.shape[2] == head_size
        and not (args.soft_cap or args.sink_tokens or args.chunk_tokens)
        and args.sinks is None
        and all(can_copy(rows) for rows in (args.query, key, value))
    )


def hopper_attention(
    args: AttentionArgs,
    first_row: int,
    num_rows: int,
    max_query_len: int,
    min_query_len: int,
) -> None:
    """See `prefill_attention`.

    Args:
        args: such that `can_attend`, without a cache.
    """
    key, value = args.fresh_key, args.fresh_value
    assert key is not None and value is not None
    cu_key_lens = args.cu_query_lens if args.cu_key_lens is None else args.cu_key_lens
    prefix = args.prefix or PrefixRows(key=key, value=value, cu_lens=cu_key_lens)
    num_heads, head_size = args.query.shape[1:]
    by_head = args.group % 2 == 0
    num_groups = num_heads // 2 if by_head else num_heads
    tokens = _BLOCK_M if by_head else 2 * _BLOCK_M
    block_n = 64 if head_size > 128 else 128
    num_tiles = cdiv(max_query_len - 1, tokens) + 1  # a row need not begin where a tile does
    num_items = num_rows * num_tiles * num_groups
    _hopper_kernel[(min(num_items, count_processors(args.query.device)),)](
        args.out,
        describe_tiles(args.query, _BLOCK_M, head_size),
        describe_tiles(key, block_n, head_size),
        describe_tiles(value, block_n, head_size),
        describe_tiles(prefix.key, block_n, head_size),
        describe_tiles(prefix.value, block_n, head_size),
        args.cu_query_lens,
        args.seq_lens,
        cu_key_lens,
        prefix.cu_lens,
        args.scale * _LOG2_E,
        args.mask()[0],
        first_row,
        min_query_len,
        num_items,
        num_tiles,
        *args.out.stride()[:2],
        args.query.stride(1),
        key.stride(1),
        value.stride(1),
        HAS_PREFIX=args.prefix is not None,
        ALIGNMENT=PREFIX_ALIGNMENT,
        GROUP=args.group,
        BY_HEAD=by_head,
        NUM_GROUPS=num_groups,
        NUM_STAGES=_NUM_STAGES,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=block_n,
        HEAD_SIZE=head_size,
        REGISTERS=_REGISTERS,
        num_warps=4,
    )
