"""Triton twin of `gated_delta_step`: a decode step of a gated delta net between its projections.

Registered by `delta_rule.py`, called through the door of `_custom_ops/state_space.py`, in two
launches. A program of the first convolves query, key and its part of the value, makes the gates and
takes columns of a head's state on; the second is that of `state_step.py`. Results are those of the
separate ops.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.causal_conv import convolve_token
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm._custom_ops.triton.state_rows import ROW_TABLES, load_row, softplus
from vllm._custom_ops.triton.state_step import check_step, finish_step
from vllm.utils.math import cdiv, next_power

L2_EPSILON = tl.constexpr(1e-6)
VALUE_BLOCK = 32  # columns of the state in a program: few, for many programs


@triton.jit
def compute_gates(a, b, a_log, dt_bias):
    """Return (logarithm of the decay, learning rate)."""
    return -tl.exp(a_log) * softplus(a.to(tl.float32) + dt_bias), tl.sigmoid(b.to(tl.float32))


@triton.jit
def norm_length(x):
    """Return a query or key divided by its length."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + L2_EPSILON)


@triton.jit
def advance_head(state_KV, query, key, value, decay, rate):
    """Return (state, output) of some columns of a head after a token; all in float32.

    Both products read the old state, so that they need one pass and one wait.
    """
    decay = tl.exp(decay)
    predicted = decay * tl.sum(state_KV * key[:, None], axis=0)
    read = decay * tl.sum(state_KV * query[:, None], axis=0)
    change = (value - predicted) * rate
    state_KV = state_KV * decay + key[:, None] * change[None, :]
    return state_KV, read + change * tl.sum(key * query, axis=0)


@fast_launch
@triton.jit(do_not_specialize_on_alignment=ROW_TABLES)
def _delta_step_kernel(
    out,
    qkv,
    a,
    b,
    conv_weight,
    a_log,
    dt_bias,
    conv_state,
    state,
    state_offsets,
    cu_query_lens,
    lens,
    scale,
    out_stride,
    out_head,
    qkv_stride,
    a_stride,
    b_stride,
    weight_stride,
    conv_unit_stride,
    conv_stride,
    unit_stride,
    offset_stride,
    KEY_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHARE: tl.constexpr,
    TAPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Take BLOCK_V columns of one head's state over a row's token."""
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    head = tl.program_id(1)
    row = tl.program_id(2)
    unit = tl.load(state_offsets + row * offset_stride).to(tl.int64)
    begin, end, computed = load_row(row, cu_query_lens, lens, True)
    if begin >= end:
        return
    token = begin.to(tl.int64)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = keys < KEY, values < VALUE
    out += token * out_stride + head * out_head + values
    if computed < 0:  # a padding row
        tl.store(out, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=is_value)
        return
    has_state = computed > 0
    own = state + unit * unit_stride + head * (KEY * VALUE)
    own = own + keys[:, None] * VALUE + values[None, :]
    in_state = is_key[:, None] & is_value[None, :]
    state_KV = tl.load(own, mask=in_state & has_state, other=0.0).to(tl.float32)
    decay, rate = compute_gates(
        tl.load(a + token * a_stride + head),
        tl.load(b + token * b_stride + head),
        tl.load(a_log + head),
        tl.load(dt_bias + head),
    )

    qkv += token * qkv_stride
    conv_state += unit * conv_unit_stride
    shared = head // SHARE * KEY + keys
    query = convolve_token(
        qkv, conv_weight, conv_weight, conv_state, shared, is_key, weight_stride,
        conv_stride, has_state, TAPS, False,
    )  # fmt: skip
    key = convolve_token(
        qkv, conv_weight, conv_weight, conv_state, KEY_HEADS * KEY + shared, is_key,
        weight_stride, conv_stride, has_state, TAPS, False,
    )  # fmt: skip
    value = convolve_token(
        qkv, conv_weight, conv_weight, conv_state, 2 * KEY_HEADS * KEY + head * VALUE + values,
        is_value, weight_stride, conv_stride, has_state, TAPS, False,
    )  # fmt: skip
    query, key = norm_length(query) * scale, norm_length(key)
    state_KV, read = advance_head(state_KV, query, key, value, decay, rate)
    tl.store(out, read.to(out.dtype.element_ty), mask=is_value)
    tl.store(own, state_KV.to(state.dtype.element_ty), mask=in_state)


def gated_delta_step(
    out_THV: Tensor,
    qkv_TC: Tensor,
    a_TH: Tensor,
    b_TH: Tensor,
    gate_THV: Tensor,
    conv_weight_CK: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    norm_weight_V: Tensor,
    conv_state: Tensor,
    state: Tensor,
    state_offsets: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    scale: float,
    epsilon: float,
) -> None:
    """See the door."""
    num_rows = state_offsets.shape[0]
    if not out_THV.shape[0] or not num_rows:
        return
    check_step(
        "gated_delta_step",
        {"out": out_THV, "qkv": qkv_TC, "a": a_TH, "b": b_TH, "gate": gate_THV},
        {"conv_weight": conv_weight_CK, "conv_state": conv_state},
        state,
    )
    num_heads, key_size, value_size = state.shape[1:]
    num_key_heads = (qkv_TC.shape[1] - num_heads * value_size) // (2 * key_size)
    rows = (state_offsets, cu_query_lens, seq_lens)
    block_v = min(next_power(value_size), VALUE_BLOCK)
    is_overlapped = overlaps(out_THV.device)
    _delta_step_kernel[cdiv(value_size, block_v), num_heads, num_rows](
        out_THV, qkv_TC, a_TH, b_TH, conv_weight_CK, a_log_H, dt_bias_H, conv_state, state, *rows,
        scale, *out_THV.stride()[:2], qkv_TC.stride(0), a_TH.stride(0), b_TH.stride(0),
        conv_weight_CK.stride(1), conv_state.stride(0), conv_state.stride(2), state.stride(0),
        state_offsets.stride(0), KEY_HEADS=num_key_heads, KEY=key_size, VALUE=value_size,
        SHARE=num_heads // num_key_heads, TAPS=conv_weight_CK.shape[1],
        BLOCK_K=next_power(key_size), BLOCK_V=block_v, num_warps=4,
        OVERLAPS=is_overlapped, launch_pdl=is_overlapped,
    )  # fmt: skip
    finish_step(
        out_THV, qkv_TC, conv_state, rows, (gate_THV, norm_weight_V), epsilon,
        group_size=value_size, gate_first=False,
    )  # fmt: skip
