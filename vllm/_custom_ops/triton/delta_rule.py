"""Triton twins of `delta_rule_gates`, `gated_delta_rule` and `gated_delta_step`.

Registered by `table.py`, called through the doors of `_custom_ops/state_space.py`. Rows of one
token are walked: the state is read once, decayed, corrected and written once, and memory is the
limit. Longer rows go through the chunks of `delta_chunks.py`. The step is that of `delta_step.py`.

Everything is in float32 but the operands of matrix products in chunks, which have the dtype of the
inputs: against the naive twin 1e-4 for float32, 2e-2 for bfloat16. How a prompt is cut into steps
may change the last bits of its state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.delta_chunks import run_delta_chunks
from vllm._custom_ops.triton.delta_step import (
    VALUE_BLOCK,
    advance_head,
    compute_gates,
    gated_delta_step,
    norm_length,
)
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.state_rows import ROW_TABLES, is_single_step, load_row
from vllm.utils.math import cdiv, next_power


@fast_launch
@triton.jit(do_not_specialize=["num_tokens"])
def _gates_kernel(
    g,
    beta,
    a,
    b,
    a_log,
    dt_bias,
    num_tokens,
    a_stride,
    b_stride,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, head = (place // HEADS).to(tl.int64), place % HEADS
    mask = token < num_tokens
    decay, rate = compute_gates(
        tl.load(a + token * a_stride + head, mask=mask, other=0.0),
        tl.load(b + token * b_stride + head, mask=mask, other=0.0),
        tl.load(a_log + head, mask=mask, other=0.0),
        tl.load(dt_bias + head, mask=mask, other=0.0),
    )
    tl.store(g + place, decay, mask=mask)
    tl.store(beta + place, rate, mask=mask)


@triton.jit
def _load_key(x, token, token_stride, head_stride, head, at, mask, HAS_L2NORM: tl.constexpr):
    """Load a query or key in float32, divided by its length if wanted."""
    value = tl.load(x + token * token_stride + head * head_stride + at, mask=mask, other=0.0)
    value = value.to(tl.float32)
    if HAS_L2NORM:
        value = norm_length(value)
    return value


@fast_launch
@triton.jit(do_not_specialize_on_alignment=ROW_TABLES)
def _delta_walk_kernel(
    out,
    q,
    k,
    v,
    g,
    beta,
    state,
    state_offsets,
    cu_query_lens,
    num_computed,
    scale,
    out_stride,
    out_head,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    g_stride,
    beta_stride,
    unit_stride,
    offset_stride,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHARE: tl.constexpr,
    HAS_L2NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Walk over a row's tokens with the state of one head, BLOCK_V of its columns, in registers."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    unit = tl.load(state_offsets + row * offset_stride).to(tl.int64)
    begin, end, computed = load_row(row, cu_query_lens, num_computed, False)
    if begin >= end:
        return
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = keys < KEY, values < VALUE
    out += head * out_head + values
    if computed < 0:  # a padding row
        for step in range(0, end - begin):
            zeros = tl.zeros([BLOCK_V], out.dtype.element_ty)
            tl.store(out + (begin + step).to(tl.int64) * out_stride, zeros, mask=is_value)
        return
    own = state + unit * unit_stride + head * (KEY * VALUE)
    own = own + keys[:, None] * VALUE + values[None, :]
    in_state = is_key[:, None] & is_value[None, :]
    state_KV = tl.load(own, mask=in_state & (computed > 0), other=0.0).to(tl.float32)
    for step in range(0, end - begin):
        token = (begin + step).to(tl.int64)
        key_head = head // SHARE
        key = _load_key(k, token, k_stride, k_head, key_head, keys, is_key, HAS_L2NORM)
        query = _load_key(q, token, q_stride, q_head, key_head, keys, is_key, HAS_L2NORM) * scale
        value = tl.load(v + token * v_stride + head * v_head + values, mask=is_value, other=0.0)
        decay = tl.load(g + token * g_stride + head)
        rate = tl.load(beta + token * beta_stride + head)
        state_KV, read = advance_head(state_KV, query, key, value.to(tl.float32), decay, rate)
        result = read.to(out.dtype.element_ty)
        tl.store(out + token * out_stride, result, mask=is_value)
    tl.store(own, state_KV.to(state.dtype.element_ty), mask=in_state)


def _walk(
    out_THV: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    state: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    scale: float,
    *,
    l2norm: bool,
) -> None:
    q, k, v = qkv
    num_heads, value_size = v.shape[1:]
    key_size = q.shape[2]
    block_v = min(next_power(value_size), VALUE_BLOCK)
    _delta_walk_kernel[cdiv(value_size, block_v), num_heads, rows[0].shape[0]](
        out_THV, q, k, v, *gates, state, *rows, scale,
        *out_THV.stride()[:2], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        gates[0].stride(0), gates[1].stride(0), state.stride(0), rows[0].stride(0),
        KEY=key_size,
        VALUE=value_size,
        SHARE=num_heads // q.shape[1],
        HAS_L2NORM=l2norm,
        BLOCK_K=next_power(key_size),
        BLOCK_V=block_v,
        num_warps=4,
    )  # fmt: skip


def delta_rule_gates(
    g_TH: Tensor, beta_TH: Tensor, a_TH: Tensor, b_TH: Tensor, a_log_H: Tensor, dt_bias_H: Tensor
) -> None:
    """See the door."""
    num_tokens, num_heads = a_TH.shape
    if not num_tokens:
        return
    block = 256
    _gates_kernel[(cdiv(num_tokens * num_heads, block),)](
        g_TH,
        beta_TH,
        a_TH,
        b_TH,
        a_log_H,
        dt_bias_H,
        num_tokens,
        a_TH.stride(0),
        b_TH.stride(0),
        HEADS=num_heads,
        BLOCK=block,
    )


def gated_delta_rule(
    out_THV: Tensor,
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    state: Tensor,
    state_offsets: Tensor,
    cu_query_lens: Tensor,
    num_computed: Tensor,
    scale: float,
    l2norm: bool,
) -> None:
    """See the door."""
    num_tokens = v_THV.shape[0]
    if not num_tokens or not state_offsets.shape[0]:
        return
    run = _walk if is_single_step(num_tokens, cu_query_lens) else run_delta_chunks
    run(
        out_THV,
        (q_THK, k_THK, v_THV),
        (g_TH, beta_TH),
        state,
        (state_offsets, cu_query_lens, num_computed),
        scale,
        l2norm=l2norm,
    )


OPS = {
    "delta_rule_gates": delta_rule_gates,
    "gated_delta_rule": gated_delta_rule,
    "gated_delta_step": gated_delta_step,
}
SCHEMAS = {
    "gated_delta_step": (
        "gated_delta_step(Tensor! out, Tensor qkv, Tensor a, Tensor b, Tensor gate, "
        "Tensor conv_weight, Tensor a_log, Tensor dt_bias, Tensor norm_weight, "
        "Tensor! conv_state, Tensor! state, Tensor state_offsets, Tensor cu_query_lens, "
        "Tensor seq_lens, float scale, float epsilon) -> ()"
    )
}
