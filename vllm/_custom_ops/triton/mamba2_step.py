"""Triton twin of `mamba2_step`: a decode step of a Mamba-2 mixer between its two projections.

Registered by `mamba2.py`, called through the door of `_custom_ops/state_space.py`. Few rows take
two launches: a program of the first convolves the channels of its head and group and takes rows of
the head's state on; the second is that of `state_step.py`. But each program of a group convolves B
and C again, which costs more than a launch once programs fill the GPU several times (64 rows of
Nemotron-H on an H200: 178 us, and 142 apart): many rows are convolved, taken on and normed in three
launches. Results are those of the separate ops.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.causal_conv import causal_conv1d_step, convolve_token
from vllm._custom_ops.triton.gated_norm import gated_rms_norm
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.mamba2_chunks import compute_dt
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm._custom_ops.triton.state_rows import ROW_TABLES, load_row
from vllm._custom_ops.triton.state_step import check_step, finish_step
from vllm.utils.math import cdiv, next_power

_TILE = 64 * 128  # numbers of a state that a program holds
FEW_HEADS = 128  # of all rows: up to so many, tiles are small and each convolves its channels


def choose_rows(num_heads: int, head_size: int, state_size: int) -> dict[str, int]:
    """Return how many rows of a state a program takes, and how it is launched.

    Args:
        num_heads: those of all rows of the step together.
    """
    block_n = next_power(state_size)
    tile = _TILE if num_heads > FEW_HEADS else _TILE // 4
    block_p = min(next_power(head_size), max(1, tile // block_n))
    num_warps = 8 if block_p * block_n >= _TILE else 4
    return {"BLOCK_P": block_p, "BLOCK_N": block_n, "num_warps": num_warps}


@triton.jit
def advance_head(state_PN, value, key, query, step, rate):
    """Return (state, what the query reads of it) for rows of a head, in float32."""
    state_PN *= tl.exp(step * rate)
    state_PN += (step * value)[:, None] * key[None, :]
    return state_PN, tl.sum(state_PN * query[None, :], axis=1)


@fast_launch
@triton.jit(do_not_specialize_on_alignment=ROW_TABLES)
def _mamba_step_kernel(
    out,
    xbc,
    dt,
    conv_weight,
    conv_bias,
    a_log,
    skip,
    dt_bias,
    conv_state,
    state,
    state_offsets,
    cu_query_lens,
    lens,
    dt_min,
    dt_max,
    out_stride,
    out_head,
    xbc_stride,
    dt_stride,
    weight_stride,
    conv_unit_stride,
    conv_stride,
    unit_stride,
    offset_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    STATE: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_CONV_BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COPIES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Take BLOCK_P rows of one head's state over a row's token; TAPS is 0 if it is convolved."""
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    head = tl.program_id(1)
    row = tl.program_id(2)
    unit = tl.load(state_offsets + row * offset_stride).to(tl.int64)
    begin, end, computed = load_row(row, cu_query_lens, lens, True)
    if begin >= end:
        return
    token = begin.to(tl.int64)
    at = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    numbers = tl.arange(0, BLOCK_N)
    is_at, is_number = at < SIZE, numbers < STATE
    out += token * out_stride + head * out_head + at
    if computed < 0:  # a padding row
        tl.store(out, tl.zeros([BLOCK_P], out.dtype.element_ty), mask=is_at)
        return
    has_state = computed > 0
    own = state + unit * unit_stride + head * (SIZE * STATE)
    own = own + at[:, None] * STATE + numbers[None, :]
    in_state = is_at[:, None] & is_number[None, :]
    state_PN = tl.load(own, mask=in_state & has_state, other=0.0).to(tl.float32)
    step = tl.load(dt + token * dt_stride + head)
    step = compute_dt(step, dt_bias, head, dt_min, dt_max, True)
    rate = -tl.exp(tl.load(a_log + head))

    xbc += token * xbc_stride
    shared = HEADS * SIZE + head // (HEADS // GROUPS) * STATE + numbers
    if TAPS:
        conv_state += unit * conv_unit_stride
        # A row for every few threads, all but one empty: each would else convolve all of its tile.
        at_P = head * SIZE + at[None, :]
        in_first = (tl.arange(0, COPIES)[:, None] == 0) & is_at[None, :]
        value = convolve_token(
            xbc, conv_weight, conv_bias, conv_state, at_P, in_first, weight_stride, conv_stride,
            has_state, TAPS, HAS_CONV_BIAS,
        )  # fmt: skip
        value = tl.sum(value, axis=0)
        key = convolve_token(
            xbc, conv_weight, conv_bias, conv_state, shared, is_number, weight_stride,
            conv_stride, has_state, TAPS, HAS_CONV_BIAS,
        )  # fmt: skip
        query = convolve_token(
            xbc, conv_weight, conv_bias, conv_state, shared + GROUPS * STATE, is_number,
            weight_stride, conv_stride, has_state, TAPS, HAS_CONV_BIAS,
        )  # fmt: skip
    else:
        value = tl.load(xbc + head * SIZE + at, mask=is_at, other=0.0).to(tl.float32)
        key = tl.load(xbc + shared, mask=is_number, other=0.0).to(tl.float32)
        query = tl.load(xbc + shared + GROUPS * STATE, mask=is_number, other=0.0).to(tl.float32)
    state_PN, read = advance_head(state_PN, value, key, query, step, rate)
    read += tl.load(skip + head) * value
    tl.store(out, read.to(out.dtype.element_ty), mask=is_at)
    tl.store(own, state_PN.to(state.dtype.element_ty), mask=in_state)


def mamba2_step(
    out_THP: Tensor,
    xbc_TC: Tensor,
    dt_TH: Tensor,
    gate_TC: Tensor | None,
    conv_weight_CK: Tensor,
    conv_bias_C: Tensor | None,
    a_log_H: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    norm_weight_C: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    state_offsets: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    dt_min: float,
    dt_max: float,
    epsilon: float,
) -> None:
    """See the door."""
    num_rows = state_offsets.shape[0]
    if not out_THP.shape[0] or not num_rows:
        return
    heads = {"out": out_THP, "xbc": xbc_TC, "dt": dt_TH, "gate": gate_TC}
    channels = {"conv_weight": conv_weight_CK, "conv_state": conv_state}
    check_step("mamba2_step", heads, channels, state)
    num_heads, head_size, state_size = state.shape[1:]
    num_groups = (xbc_TC.shape[1] - num_heads * head_size) // (2 * state_size)
    rows = (state_offsets, cu_query_lens, seq_lens)
    is_few = num_rows * num_heads <= FEW_HEADS
    given_TC = xbc_TC
    if not is_few:
        given_TC = xbc_TC.new_empty(num_rows, xbc_TC.shape[1])
        conv = (conv_weight_CK, conv_bias_C, conv_state)
        causal_conv1d_step(given_TC, xbc_TC[:num_rows], None, None, *conv, *rows, True)
    is_overlapped = overlaps(out_THP.device)
    choice = choose_rows(num_rows * num_heads, head_size, state_size)
    _mamba_step_kernel[cdiv(head_size, choice["BLOCK_P"]), num_heads, num_rows](
        out_THP, given_TC, dt_TH, conv_weight_CK, conv_bias_C, a_log_H, D_H, dt_bias_H, conv_state,
        state, *rows, dt_min, dt_max, *out_THP.stride()[:2], given_TC.stride(0), dt_TH.stride(0),
        conv_weight_CK.stride(1), conv_state.stride(0), conv_state.stride(2), state.stride(0),
        state_offsets.stride(0), HEADS=num_heads, GROUPS=num_groups, SIZE=head_size,
        STATE=state_size, TAPS=conv_weight_CK.shape[1] if is_few else 0,
        HAS_CONV_BIAS=conv_bias_C is not None,
        COPIES=max(1, 32 * choice["num_warps"] // choice["BLOCK_P"]),
        OVERLAPS=is_overlapped, launch_pdl=is_overlapped, **choice,
    )  # fmt: skip
    norm = None
    if gate_TC is not None and norm_weight_C is not None:
        norm = (gate_TC, norm_weight_C)
    size = num_heads * head_size // num_groups
    if is_few:
        finish_step(
            out_THP, xbc_TC, conv_state, rows, norm, epsilon, group_size=size, gate_first=True
        )
    elif norm is not None:
        out_TC, gate_TC = out_THP[:num_rows].view(-1, num_heads * head_size), norm[0][:num_rows]
        gated_rms_norm(out_TC, out_TC, gate_TC, norm[1], epsilon, size, True)
