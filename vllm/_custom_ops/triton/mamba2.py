"""Triton twins of `mamba2_scan` and `mamba2_step`.

Registered by `table.py`, called through the doors of `_custom_ops/state_space.py`. Rows of one
token are walked: the state is read and written once, and memory is the limit. Longer rows go
through the chunks of `mamba2_chunks.py`.

Everything is in float32 but the operands of matrix products in chunks, which have the dtype of the
inputs: against the naive twin 1e-4 for float32, 2e-2 for bfloat16. A state may be kept in fewer
bits: it is rounded once a step. How a prompt is cut into steps may change the last bits of its
state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.mamba2_chunks import Scan, compute_dt, run_mamba_chunks
from vllm._custom_ops.triton.overlap import (
    LINE_BYTES,
    await_inputs,
    let_next_start,
    overlaps,
    prefetch_lines,
)
from vllm._custom_ops.triton.state_rows import ROW_TABLES, is_single_step, load_row
from vllm.utils.math import cdiv, next_power

_STEP_TILE = 64 * 128  # numbers of a state that a program of the walk holds
FEW_HEADS = 128  # up to so many, smaller tiles give every processor its share
FETCHED_BYTES = 32 << 20  # states that L2 holds beside what the kernel before uses


@fast_launch
@triton.jit(do_not_specialize_on_alignment=ROW_TABLES)
def _mamba_step_kernel(
    out,
    x,
    dt,
    a,
    b,
    c,
    skip,
    dt_bias,
    state,
    state_offsets,
    cu_query_lens,
    lens,
    dt_min,
    dt_max,
    out_stride,
    out_head,
    x_stride,
    x_head,
    dt_stride,
    b_stride,
    b_group,
    c_stride,
    c_group,
    unit_stride,
    offset_stride,
    SIZE: tl.constexpr,
    STATE: tl.constexpr,
    SHARE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_AFTER: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LINES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Walk over a row's tokens with BLOCK_P rows of one head's state in registers.

    `a` is A, or its A_log for the step op (IS_AFTER). While the kernel before runs, the state is
    fetched in LINES lines; should the offset be of another step, nothing is lost but the time.
    """
    head = tl.program_id(1)
    row = tl.program_id(2)
    if LINES:
        unit = tl.load(state_offsets + row * offset_stride).to(tl.int64)
        lines = state + unit * unit_stride + head * (SIZE * STATE)
        lines += tl.program_id(0) * (BLOCK_P * STATE)
        prefetch_lines(lines + tl.arange(0, LINES) * (BLOCK_P * STATE // LINES), OVERLAPS)
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    begin, end, computed = load_row(row, cu_query_lens, lens, IS_AFTER)
    if begin >= end:
        return
    at = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    numbers = tl.arange(0, BLOCK_N)
    is_at, is_number = at < SIZE, numbers < STATE
    out += head * out_head + at
    if computed < 0:  # a padding row
        for index in range(0, end - begin):
            zeros = tl.zeros([BLOCK_P], out.dtype.element_ty)
            tl.store(out + (begin + index).to(tl.int64) * out_stride, zeros, mask=is_at)
        return
    unit = tl.load(state_offsets + row * offset_stride).to(tl.int64)
    own = state + unit * unit_stride + head * (SIZE * STATE)
    own = own + at[:, None] * STATE + numbers[None, :]
    in_state = is_at[:, None] & is_number[None, :]
    state_PN = tl.load(own, mask=in_state & (computed > 0), other=0.0).to(tl.float32)
    rate = tl.load(a + head)
    if IS_AFTER:
        rate = -tl.exp(rate)
    group = head // SHARE
    num_steps = 1 if IS_AFTER else end - begin  # a loop of one turn is none and takes less
    for index in range(0, num_steps):
        token = (begin + index).to(tl.int64)
        step = tl.load(dt + token * dt_stride + head)
        step = compute_dt(step, dt_bias, head, dt_min, dt_max, HAS_BIAS)
        value = tl.load(x + token * x_stride + head * x_head + at, mask=is_at, other=0.0)
        value = value.to(tl.float32)
        key = tl.load(b + token * b_stride + group * b_group + numbers, mask=is_number, other=0.0)
        query = tl.load(c + token * c_stride + group * c_group + numbers, mask=is_number, other=0.0)
        state_PN *= tl.exp(step * rate)
        state_PN += (step * value)[:, None] * key.to(tl.float32)[None, :]
        read = tl.sum(state_PN * query.to(tl.float32)[None, :], axis=1)
        if HAS_SKIP:
            read += tl.load(skip + head) * value
        tl.store(out + token * out_stride, read.to(out.dtype.element_ty), mask=is_at)
    tl.store(own, state_PN.to(state.dtype.element_ty), mask=in_state)


def _run_steps(scan: Scan, *, is_after: bool) -> None:
    head_size, state_size = scan.x.shape[2], scan.b.shape[2]
    block_n = next_power(state_size)
    num_rows, num_heads = scan.state_offsets.shape[0], scan.x.shape[1]
    tile = _STEP_TILE if num_rows * num_heads > FEW_HEADS else _STEP_TILE // 4
    block_p = min(next_power(head_size), max(1, tile // block_n))
    is_overlapped = overlaps(scan.x.device)
    _mamba_step_kernel[cdiv(head_size, block_p), num_heads, num_rows](
        scan.out, scan.x, scan.dt, scan.a, scan.b, scan.c, scan.skip, scan.dt_bias, scan.state,
        scan.state_offsets, scan.cu_query_lens, scan.lens, scan.dt_min, scan.dt_max,
        *scan.strides(), IS_AFTER=is_after, BLOCK_P=block_p, BLOCK_N=block_n,
        LINES=_count_lines(scan, block_p) if is_overlapped else 0,
        OVERLAPS=is_overlapped, launch_pdl=is_overlapped,
        num_warps=8 if block_p * block_n >= _STEP_TILE else 4, **scan.sizes(),
    )  # fmt: skip


def _count_lines(scan: Scan, block_p: int) -> int:
    """Return in how many lines a program fetches its tile of a state; 0 if it does not."""
    num_rows, (num_heads, head_size, state_size) = scan.lens.shape[0], scan.state.shape[1:]
    itemsize = scan.state.element_size()
    num_bytes = num_rows * num_heads * head_size * state_size * itemsize
    if head_size % block_p or num_bytes > FETCHED_BYTES:
        return 0
    return next_power(cdiv(block_p * state_size * itemsize, LINE_BYTES))


def mamba2_scan(
    out_THP: Tensor,
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    D_H: Tensor | None,
    dt_bias_H: Tensor | None,
    state: Tensor,
    state_offsets: Tensor,
    cu_query_lens: Tensor,
    num_computed: Tensor,
    dt_min: float,
    dt_max: float,
) -> None:
    """See the door."""
    if not x_THP.shape[0] or not state_offsets.shape[0]:
        return
    scan = Scan(
        out=out_THP, x=x_THP, dt=dt_TH, a=A_H, b=B_TGN, c=C_TGN, skip=D_H, dt_bias=dt_bias_H,
        state=state, state_offsets=state_offsets, cu_query_lens=cu_query_lens, lens=num_computed,
        dt_min=dt_min, dt_max=dt_max,
    )  # fmt: skip
    if is_single_step(x_THP.shape[0], cu_query_lens):
        _run_steps(scan, is_after=False)
    else:
        run_mamba_chunks(scan)


def mamba2_step(
    out_THP: Tensor,
    x_THP: Tensor,
    dt_TH: Tensor,
    a_log_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    state: Tensor,
    state_offsets: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    dt_min: float,
    dt_max: float,
) -> None:
    """See the door."""
    if not x_THP.shape[0] or not state_offsets.shape[0]:
        return
    scan = Scan(
        out=out_THP, x=x_THP, dt=dt_TH, a=a_log_H, b=B_TGN, c=C_TGN, skip=D_H, dt_bias=dt_bias_H,
        state=state, state_offsets=state_offsets, cu_query_lens=cu_query_lens, lens=seq_lens,
        dt_min=dt_min, dt_max=dt_max,
    )  # fmt: skip
    _run_steps(scan, is_after=True)


OPS = {"mamba2_scan": mamba2_scan, "mamba2_step": mamba2_step}
SCHEMAS = {
    "mamba2_step": (
        "mamba2_step(Tensor! out, Tensor x, Tensor dt, Tensor a_log, Tensor B, Tensor C, Tensor D, "
        "Tensor dt_bias, Tensor! state, Tensor state_offsets, Tensor cu_query_lens, "
        "Tensor seq_lens, float dt_min, float dt_max) -> ()"
    )
}
