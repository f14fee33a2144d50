"""Triton twins of `delta_rule_gates`, `gated_delta_rule` and `gated_delta_step`.

Registered by `table.py`, called through the doors of `_custom_ops/state_space.py`. Rows of one
token are walked: the state is read once, decayed, corrected and written once, and memory is the
limit. Longer rows go through the chunks of `delta_chunks.py`.

Everything is in float32 but the operands of matrix products in chunks, which have the dtype of the
inputs: against the naive twin 1e-4 for float32, 2e-2 for bfloat16. How a prompt is cut into steps
may change the last bits of its state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.delta_chunks import run_delta_chunks
from vllm._custom_ops.triton.gated_norm import gated_rms_norm
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm._custom_ops.triton.state_rows import ROW_TABLES, is_single_step, load_row, softplus
from vllm.utils.math import cdiv, next_power

_L2_EPSILON = tl.constexpr(1e-6)
VALUE_BLOCK = 32  # columns of the state in a program of one token: few, for many programs


@triton.jit
def _compute_gates(a, b, a_log, dt_bias):
    """Return (logarithm of the decay, learning rate)."""
    return -tl.exp(a_log) * softplus(a.to(tl.float32) + dt_bias), tl.sigmoid(b.to(tl.float32))


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
    decay, rate = _compute_gates(
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
        value *= tl.rsqrt(tl.sum(value * value, axis=0) + _L2_EPSILON)
    return value


@fast_launch
@triton.jit(do_not_specialize_on_alignment=ROW_TABLES)
def _delta_step_kernel(
    out,
    q,
    k,
    v,
    g,
    beta,
    a_log,
    dt_bias,
    state,
    state_offsets,
    cu_query_lens,
    lens,
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
    HAS_RAW_GATES: tl.constexpr,
    IS_AFTER: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Walk over a row's tokens with the state of one head, BLOCK_V of its columns, in registers."""
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    head = tl.program_id(1)
    row = tl.program_id(2)
    unit = tl.load(state_offsets + row * offset_stride).to(tl.int64)
    begin, end, computed = load_row(row, cu_query_lens, lens, IS_AFTER)
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
    num_steps = 1 if IS_AFTER else end - begin  # a loop of one turn is none and takes less
    for step in range(0, num_steps):
        token = (begin + step).to(tl.int64)
        key_head = head // SHARE
        key = _load_key(k, token, k_stride, k_head, key_head, keys, is_key, HAS_L2NORM)
        query = _load_key(q, token, q_stride, q_head, key_head, keys, is_key, HAS_L2NORM) * scale
        value = tl.load(v + token * v_stride + head * v_head + values, mask=is_value, other=0.0)
        decay = tl.load(g + token * g_stride + head)
        rate = tl.load(beta + token * beta_stride + head)
        if HAS_RAW_GATES:
            decay, rate = _compute_gates(
                decay, rate, tl.load(a_log + head), tl.load(dt_bias + head)
            )
        # Both products read the old state, so that they need one pass and one wait.
        decay = tl.exp(decay)
        predicted = decay * tl.sum(state_KV * key[:, None], axis=0)
        read = decay * tl.sum(state_KV * query[:, None], axis=0)
        change = (value.to(tl.float32) - predicted) * rate
        state_KV = state_KV * decay + key[:, None] * change[None, :]
        result = (read + change * tl.sum(key * query, axis=0)).to(out.dtype.element_ty)
        tl.store(out + token * out_stride, result, mask=is_value)
    tl.store(own, state_KV.to(state.dtype.element_ty), mask=in_state)


def _run_steps(
    out_THV: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    state: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    scale: float,
    *,
    l2norm: bool,
    raw: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Launch the walk; with `raw`, A_log and dt_bias, gates are raw and lengths those after it."""
    q, k, v = qkv
    num_heads, value_size = v.shape[1:]
    key_size = q.shape[2]
    block_v = min(next_power(value_size), VALUE_BLOCK)
    is_overlapped = overlaps(q.device)
    _delta_step_kernel[cdiv(value_size, block_v), num_heads, rows[0].shape[0]](
        out_THV, q, k, v, *gates, *(raw or gates), state, *rows, scale,
        *out_THV.stride()[:2], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        gates[0].stride(0), gates[1].stride(0), state.stride(0), rows[0].stride(0),
        KEY=key_size,
        VALUE=value_size,
        SHARE=num_heads // q.shape[1],
        HAS_L2NORM=l2norm,
        HAS_RAW_GATES=raw is not None,
        IS_AFTER=raw is not None,
        OVERLAPS=is_overlapped,
        BLOCK_K=next_power(key_size),
        BLOCK_V=block_v,
        num_warps=4,
        launch_pdl=is_overlapped,
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
    run = _run_steps if is_single_step(num_tokens, cu_query_lens) else run_delta_chunks
    run(
        out_THV,
        (q_THK, k_THK, v_THV),
        (g_TH, beta_TH),
        state,
        (state_offsets, cu_query_lens, num_computed),
        scale,
        l2norm=l2norm,
    )


def gated_delta_step(
    out_THV: Tensor,
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    a_TH: Tensor,
    b_TH: Tensor,
    gate_THV: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    norm_weight_V: Tensor,
    state: Tensor,
    state_offsets: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    scale: float,
    epsilon: float,
) -> None:
    """See the door."""
    if not v_THV.shape[0] or not state_offsets.shape[0]:
        return
    num_rows = state_offsets.shape[0]
    _run_steps(
        out_THV,
        (q_THK, k_THK, v_THV),
        (a_TH, b_TH),
        state,
        (state_offsets, cu_query_lens, seq_lens),
        scale,
        l2norm=True,
        raw=(a_log_H, dt_bias_H),
    )
    # The rows' tokens come first; those of other rows may follow and are not to be touched.
    out_TC, gate_TC = (t[:num_rows].flatten(1) for t in (out_THV, gate_THV))
    gated_rms_norm(out_TC, out_TC, gate_TC, norm_weight_V, epsilon, v_THV.shape[2], False)


OPS = {
    "delta_rule_gates": delta_rule_gates,
    "gated_delta_rule": gated_delta_rule,
    "gated_delta_step": gated_delta_step,
}
SCHEMAS = {
    "gated_delta_step": (
        "gated_delta_step(Tensor! out, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, "
        "Tensor gate, Tensor a_log, Tensor dt_bias, Tensor norm_weight, Tensor! state, "
        "Tensor state_offsets, Tensor cu_query_lens, Tensor seq_lens, float scale, "
        "float epsilon) -> ()"
    )
}
