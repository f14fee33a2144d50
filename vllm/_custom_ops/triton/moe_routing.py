"""Sorts (token, expert) pairs by expert on the device, and cuts them into blocks of one expert.

Called by `moe.py`. Nothing is read back by the host: tables are as long as the worst routing needs.
Each group of pairs is counted by a program of its own, the last of them to arrive adds the counts
up, and where the pairs of each group and expert begin follows from the sums. From there an atomic
counter places them: their order within a group may differ from run to run, which changes no result,
since a row's product depends on how many rows its expert has and not on which lie beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.arrival import get_counters, is_last_to_arrive
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm.utils.math import cdiv, next_power

_GROUP_PAIRS = 1024
"""Pairs that one program counts and places."""

_MAX_BASES = 4096
"""Groups times experts whose counts are added up at a time."""

_FILLED_BLOCKS = 128

_TABLES = ("order", "bases", "ends", "block_experts", "block_starts")
"""Lie one behind the other in one tensor; kernels are not compiled anew for where they begin."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """Where the pairs of each expert lie. Pair t * k + j is the j-th choice of token t.

    Attributes:
        max_blocks: blocks that the tables have room for.
        order: int32 [P], pairs by expert.
        ends: int32 [N], where the pairs of each expert end in `order`.
        block_experts: int32 [max_blocks], -1 from the first unused block on.
        block_starts: int32 [max_blocks], first pair of the block in `order`.
    """

    max_blocks: int
    order: Tensor
    ends: Tensor
    block_experts: Tensor
    block_starts: Tensor


def sort_pairs(ids_TK: Tensor, num_experts: int, block_rows: int) -> Routing:
    """Sort the pairs of contiguous int32 ids [T, k]; ids outside of 0..N-1 are left out."""
    num_pairs = ids_TK.numel()
    num_groups = cdiv(num_pairs, _GROUP_PAIRS)
    max_blocks = min(num_pairs, cdiv(num_pairs, block_rows) + num_experts)
    experts = max(16, next_power(num_experts))
    num_bases = num_groups * experts
    room = ids_TK.new_empty(num_bases + num_pairs + num_experts + 2 * max_blocks)
    bases, order, ends, block_experts, block_starts = room.split(
        (num_bases, num_pairs, num_experts, max_blocks, max_blocks)
    )
    is_overlapped = overlaps(ids_TK.device)
    _count_kernel[(num_groups,)](
        ids_TK,
        order,
        bases,
        ends,
        block_experts,
        block_starts,
        get_counters(ids_TK.device),
        num_pairs,
        max_blocks,
        num_experts,
        IS_ONLY=num_groups == 1,
        EXPERTS=experts,
        GROUP_PAIRS=_GROUP_PAIRS,
        CHUNK_GROUPS=max(1, _MAX_BASES // experts),
        BLOCK_ROWS=block_rows,
        BLOCKS=_FILLED_BLOCKS,
        OVERLAPS=is_overlapped,
        launch_pdl=is_overlapped,
        num_warps=8,
    )
    if num_groups > 1:
        _place_kernel[(num_groups,)](
            ids_TK,
            order,
            bases,
            num_pairs,
            num_experts,
            EXPERTS=experts,
            GROUP_PAIRS=_GROUP_PAIRS,
            OVERLAPS=is_overlapped,
            launch_pdl=is_overlapped,
            num_warps=8,
        )
    return Routing(
        max_blocks=max_blocks,
        order=order,
        ends=ends,
        block_experts=block_experts,
        block_starts=block_starts,
    )


@triton.jit
def _count(ids, first, num_pairs, num_experts, EXPERTS: tl.constexpr, PAIRS: tl.constexpr):
    pairs = first + tl.arange(0, PAIRS)
    chosen = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1)
    is_valid = (chosen >= 0) & (chosen < num_experts)
    return tl.histogram(tl.where(is_valid, chosen, 0), EXPERTS, mask=is_valid)


@triton.jit
def _place(ids, order, places, first, num_pairs, num_experts, PAIRS: tl.constexpr):
    """Place a group of pairs; `places` [EXPERTS] says where the next of each expert goes."""
    pairs = first + tl.arange(0, PAIRS)
    chosen = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1)
    is_valid = (chosen >= 0) & (chosen < num_experts)
    place = tl.atomic_add(places + chosen, 1, mask=is_valid, sem="relaxed")
    tl.store(order + place, pairs, mask=is_valid)


@triton.jit
def _lay_out(
    counts,
    ends,
    block_experts,
    block_starts,
    max_blocks,
    num_experts,
    EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write where the experts' pairs end and what blocks there are; return where they begin."""
    experts = tl.arange(0, EXPERTS)
    expert_ends = tl.cumsum(counts, 0)
    starts = expert_ends - counts
    tl.store(ends + experts, expert_ends, mask=experts < num_experts)
    num_blocks = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    firsts = tl.cumsum(num_blocks, 0) - num_blocks
    for block in range(tl.max(num_blocks, 0)):
        is_block = block < num_blocks
        tl.store(block_experts + firsts + block, experts, mask=is_block)
        tl.store(block_starts + firsts + block, starts + block * BLOCK_ROWS, mask=is_block)
    for first in range(tl.sum(num_blocks, 0), max_blocks, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        tl.store(block_experts + blocks, -1, mask=blocks < max_blocks)
    return starts


@fast_launch
@triton.jit(do_not_specialize=["num_pairs", "max_blocks"], do_not_specialize_on_alignment=_TABLES)
def _count_kernel(
    ids,
    order,
    bases,
    ends,
    block_experts,
    block_starts,
    counters,
    num_pairs,
    max_blocks,
    num_experts,
    IS_ONLY: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUP_PAIRS: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Count each group of pairs; the last program lays out. One alone places the pairs too."""
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    group, num_groups = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, EXPERTS)
    counts = _count(ids, group * GROUP_PAIRS, num_pairs, num_experts, EXPERTS, GROUP_PAIRS)
    if IS_ONLY:
        starts = _lay_out(
            counts, ends, block_experts, block_starts, max_blocks, num_experts,
            EXPERTS, BLOCK_ROWS, BLOCKS,
        )  # fmt: skip
        tl.store(bases + experts, starts)
        tl.debug_barrier()  # other threads count on from there
        _place(ids, order, bases, 0, num_pairs, num_experts, GROUP_PAIRS)
    else:
        tl.store(bases + group * EXPERTS + experts, counts)
        if is_last_to_arrive(counters, num_groups):
            lanes = tl.arange(0, CHUNK_GROUPS)[:, None]
            places = bases + lanes * EXPERTS + experts[None, :]
            totals = tl.zeros((EXPERTS,), tl.int32)
            for first in range(0, num_groups, CHUNK_GROUPS):
                is_group = first + lanes < num_groups
                part = tl.load(
                    places + first * EXPERTS, mask=is_group, other=0, cache_modifier=".cg"
                )
                totals += tl.sum(part, 0)
            starts = _lay_out(
                totals, ends, block_experts, block_starts, max_blocks, num_experts,
                EXPERTS, BLOCK_ROWS, BLOCKS,
            )  # fmt: skip
            for first in range(0, num_groups, CHUNK_GROUPS):
                is_group = first + lanes < num_groups
                part = tl.load(
                    places + first * EXPERTS, mask=is_group, other=0, cache_modifier=".cg"
                )
                before = tl.cumsum(part, 0) - part + starts[None, :]
                tl.store(places + first * EXPERTS, before, mask=is_group)
                starts += tl.sum(part, 0)


@fast_launch
@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=_TABLES)
def _place_kernel(
    ids,
    order,
    bases,
    num_pairs,
    num_experts,
    EXPERTS: tl.constexpr,
    GROUP_PAIRS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    group = tl.program_id(0)
    places = bases + group * EXPERTS
    _place(ids, order, places, group * GROUP_PAIRS, num_pairs, num_experts, GROUP_PAIRS)
