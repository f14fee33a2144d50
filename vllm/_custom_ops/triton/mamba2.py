"""Triton twins of `mamba2_scan` and `mamba2_step`.

Registered by `table.py`, called through the doors of `_custom_ops/state_space.py`. Rows of one
token are walked: the state is read and written once, and memory is the limit. Longer rows go
through the chunks of `mamba2_hopper.py` where that serves, else of `mamba2_chunks.py`. The step is
that of `mamba2_step.py`.

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
from vllm._custom_ops.triton.mamba2_hopper import can_walk, walk_chunks
from vllm._custom_ops.triton.mamba2_step import advance_head, choose_rows, mamba2_step
from vllm._custom_ops.triton.state_rows import ROW_TABLES, is_single_step, load_row
from vllm.utils.math import cdiv


@fast_launch
@triton.jit(do_not_specialize_on_alignment=ROW_TABLES)
def _mamba_walk_kernel(
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
    num_computed,
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
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Walk over a row's tokens with BLOCK_P rows of one head's state in registers."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    begin, end, computed = load_row(row, cu_query_lens, num_computed, False)
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
    group = head // SHARE
    for index in range(0, end - begin):
        token = (begin + index).to(tl.int64)
        step = tl.load(dt + token * dt_stride + head)
        step = compute_dt(step, dt_bias, head, dt_min, dt_max, HAS_BIAS)
        value = tl.load(x + token * x_stride + head * x_head + at, mask=is_at, other=0.0)
        value = value.to(tl.float32)
        key = tl.load(b + token * b_stride + group * b_group + numbers, mask=is_number, other=0.0)
        query = tl.load(c + token * c_stride + group * c_group + numbers, mask=is_number, other=0.0)
        key, query = key.to(tl.float32), query.to(tl.float32)
        state_PN, read = advance_head(state_PN, value, key, query, step, rate)
        if HAS_SKIP:
            read += tl.load(skip + head) * value
        tl.store(out + token * out_stride, read.to(out.dtype.element_ty), mask=is_at)
    tl.store(own, state_PN.to(state.dtype.element_ty), mask=in_state)


def _walk(scan: Scan) -> None:
    num_rows, num_heads, head_size = scan.lens.shape[0], *scan.x.shape[1:]
    rows = choose_rows(num_rows * num_heads, head_size, scan.b.shape[2])
    _mamba_walk_kernel[cdiv(head_size, rows["BLOCK_P"]), num_heads, num_rows](
        scan.out, scan.x, scan.dt, scan.a, scan.b, scan.c, scan.skip, scan.dt_bias, scan.state,
        scan.state_offsets, scan.cu_query_lens, scan.lens, scan.dt_min, scan.dt_max,
        *scan.strides(), **rows, **scan.sizes(),
    )  # fmt: skip


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
        _walk(scan)
    elif can_walk(scan):
        walk_chunks(scan)
    else:
        run_mamba_chunks(scan)


OPS = {"mamba2_scan": mamba2_scan, "mamba2_step": mamba2_step}
SCHEMAS = {
    "mamba2_step": (
        "mamba2_step(Tensor! out, Tensor xbc, Tensor dt, Tensor? gate, Tensor conv_weight, "
        "Tensor? conv_bias, Tensor a_log, Tensor D, Tensor dt_bias, Tensor? norm_weight, "
        "Tensor! conv_state, Tensor! state, Tensor state_offsets, Tensor cu_query_lens, "
        "Tensor seq_lens, float dt_min, float dt_max, float epsilon) -> ()"
    )
}
