"""Sorts (token, expert) pairs by expert on the device, and cuts them into blocks of one expert.

Called by `moe.py`. Nothing is read back by the host: tables are as long as the worst routing needs.
The order of the pairs of one expert is that of an atomic counter and may differ from run to run;
results do not, since a row's product does not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.launch import fast_launch

_CHUNK_PAIRS = 2048
_PLACED_PAIRS = 1024
_CHUNK_BLOCKS = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """Where the pairs of each expert lie. Pair t * k + j is the j-th choice of token t.

    Attributes:
        block_rows: most pairs of a block.
        max_blocks: blocks that the tables have room for.
        order: int32 [P], pairs by expert.
        ends: int32 [N], where the pairs of each expert end in `order`.
        block_experts: int32 [max_blocks], -1 from the first unused block on.
        block_starts: int32 [max_blocks], first pair of the block in `order`.
    """

    block_rows: int
    max_blocks: int
    order: Tensor
    ends: Tensor
    block_experts: Tensor
    block_starts: Tensor


def sort_pairs(ids_TK: Tensor, num_experts: int, block_rows: int) -> Routing:
    """Sort the pairs of contiguous int32 ids [T, k]; ids outside of 0..N-1 are left out."""
    num_pairs = ids_TK.numel()
    max_blocks = min(num_pairs, triton.cdiv(num_pairs, block_rows) + num_experts)
    room = ids_TK.new_empty(num_pairs + 2 * num_experts + 2 * max_blocks)
    order, ends, cursors, block_experts, block_starts = room.split(
        (num_pairs, num_experts, num_experts, max_blocks, max_blocks)
    )
    _count_kernel[(1,)](
        ids_TK,
        ends,
        cursors,
        block_experts,
        block_starts,
        num_pairs,
        max_blocks,
        num_experts,
        EXPERTS=max(16, triton.next_power_of_2(num_experts + 1)),
        PAIRS=_CHUNK_PAIRS,
        BLOCKS=_CHUNK_BLOCKS,
        BLOCK_ROWS=block_rows,
        num_warps=8,
    )
    _place_kernel[(triton.cdiv(num_pairs, _PLACED_PAIRS),)](
        ids_TK, order, cursors, num_pairs, num_experts, PAIRS=_PLACED_PAIRS
    )
    return Routing(
        block_rows=block_rows,
        max_blocks=max_blocks,
        order=order,
        ends=ends,
        block_experts=block_experts,
        block_starts=block_starts,
    )


@fast_launch
@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def _count_kernel(
    ids,
    ends,
    cursors,
    block_experts,
    block_starts,
    num_pairs,
    max_blocks,
    num_experts,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Count, then lay out; one program, so that all counts are known. EXPERTS > num_experts."""
    experts = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_pairs, PAIRS):
        pairs = first + tl.arange(0, PAIRS)
        chosen = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1)
        is_valid = (chosen >= 0) & (chosen < num_experts)
        counts += tl.histogram(tl.where(is_valid, chosen, EXPERTS - 1), EXPERTS)
    is_expert = experts < num_experts
    counts = tl.where(is_expert, counts, 0)
    expert_ends = tl.cumsum(counts, 0)
    starts = expert_ends - counts
    tl.store(ends + experts, expert_ends, mask=is_expert)
    tl.store(cursors + experts, starts, mask=is_expert)
    num_blocks = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    blocks_ends = tl.cumsum(num_blocks, 0)
    first_rows = starts - (blocks_ends - num_blocks) * BLOCK_ROWS
    for first in range(0, max_blocks, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        owners = tl.sum((blocks_ends[None, :] <= blocks[:, None]).to(tl.int32), 1)
        is_owner = owners[:, None] == experts[None, :]
        rows = tl.sum(tl.where(is_owner, first_rows[None, :], 0), 1) + blocks * BLOCK_ROWS
        is_in = blocks < max_blocks
        is_used = owners < num_experts
        tl.store(block_experts + blocks, tl.where(is_used, owners, -1), mask=is_in)
        tl.store(block_starts + blocks, tl.where(is_used, rows, 0), mask=is_in)


@fast_launch
@triton.jit(do_not_specialize=["num_pairs"])
def _place_kernel(ids, order, cursors, num_pairs, num_experts, PAIRS: tl.constexpr):
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    chosen = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1)
    is_valid = (chosen >= 0) & (chosen < num_experts)
    places = tl.atomic_add(cursors + chosen, 1, mask=is_valid, sem="relaxed")
    tl.store(order + places, pairs, mask=is_valid)
