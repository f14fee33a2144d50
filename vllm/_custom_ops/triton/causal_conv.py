"""Triton twins of the causal convolution: `causal_conv1d` and `causal_conv1d_step`.

Registered by `table.py`, called through the doors of `_custom_ops/state_space.py`. Sums are in
float32 in the order of the taps; results equal the CPU's but for the last bit of the exponential.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm._custom_ops.triton.state_rows import (
    ROW_TABLES,
    count_places,
    find_row,
    is_single_step,
    load_row,
)
from vllm.utils.math import cdiv

_CHUNK = 16  # tokens of a program; at least TAPS - 1, so that a row's first chunk alone reads state
_BLOCK = 256  # channels of a program, 8 for each thread of a warp: loads of 16 bytes
_CHUNK_WARPS = 4


@triton.jit
def _load_input(
    token,
    begin,
    x,
    gate,
    state,
    channels,
    is_channel,
    x_stride,
    gate_stride,
    state_stride,
    has_state,
    HAS_GATE: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Return the input `token` of a row; before its first token, what the state remembers."""
    is_new = token >= begin
    place = tl.cast(token, tl.int64)
    fresh = tl.load(x + place * x_stride + channels, mask=is_channel & is_new, other=0.0)
    if HAS_GATE:
        factor = tl.load(gate + place * gate_stride + channels, mask=is_channel & is_new, other=0.0)
        fresh = (fresh.to(tl.float32) * factor.to(tl.float32)).to(x.dtype.element_ty)
    old = tl.load(
        state + (token - begin + TAPS - 1) * state_stride + channels,
        mask=is_channel & (token < begin) & has_state,
        other=0.0,
    )
    return tl.where(is_new, fresh, old)


@triton.jit
def _finish(
    total, bias, channels, is_channel, dtype, HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr
):
    """Return sums with bias and activation, rounded after each."""
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)
    result = total.to(dtype)
    if HAS_SILU:
        total = result.to(tl.float32)
        result = (total / (1.0 + tl.exp(-total))).to(dtype)
    return result


@triton.jit
def _move_state(
    end,
    begin,
    x,
    gate,
    state,
    channels,
    is_channel,
    x_stride,
    gate_stride,
    state_stride,
    has_state,
    HAS_GATE: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Overwrite a row's state with its last inputs."""
    for tap in tl.static_range(TAPS - 1):  # upwards: what is read lies above what is written
        value = _load_input(
            end - (TAPS - 1) + tap, begin, x, gate, state, channels, is_channel,
            x_stride, gate_stride, state_stride, has_state, HAS_GATE, TAPS,
        )  # fmt: skip
        tl.debug_barrier()  # all threads have read before one overwrites
        tl.store(state + tap * state_stride + channels, value, mask=is_channel)


@fast_launch
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=ROW_TABLES)
def _conv_chunk_kernel(
    out,
    x,
    weight,
    bias,
    state,
    state_offsets,
    cu_query_lens,
    num_computed,
    num_rows,
    num_channels,
    out_stride,
    x_stride,
    weight_stride,
    unit_stride,
    state_stride,
    offset_stride,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolve BLOCK channels of CHUNK tokens of a row; a row's first program moves its state.

    Only a row's first chunk reads the old state, since CHUNK is at least TAPS - 1. Every input is
    loaded once for each tap, all but the first time from the nearest cache.
    """
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channels < num_channels
    row, chunk = find_row(tl.program_id(1), cu_query_lens, num_rows, CHUNK)
    begin, end, computed = load_row(row, cu_query_lens, num_computed, False)
    first = begin + chunk * CHUNK
    if first >= end:
        return
    state += tl.load(state_offsets + row * offset_stride).to(tl.int64) * unit_stride
    tokens = first + tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK, BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        source = tokens - (TAPS - 1) + tap
        places = source.to(tl.int64)[:, None] * x_stride + channels[None, :]
        is_new = (source >= begin) & (source < end)
        value = tl.load(x + places, mask=is_new[:, None] & is_channel[None, :], other=0.0)
        if chunk == 0:
            before = (source - begin + TAPS - 1)[:, None] * state_stride + channels[None, :]
            is_old = (source < begin) & (computed > 0)
            value += tl.load(state + before, mask=is_old[:, None] & is_channel[None, :], other=0.0)
        factor = tl.load(weight + tap * weight_stride + channels, mask=is_channel, other=0.0)
        total += value.to(tl.float32) * factor.to(tl.float32)[None, :]
    result = _finish(total, bias, channels, is_channel, out.dtype.element_ty, HAS_BIAS, HAS_SILU)
    places = tokens.to(tl.int64)[:, None] * out_stride + channels[None, :]
    tl.store(out + places, result, mask=(tokens < end)[:, None] & is_channel[None, :])
    if chunk == 0:
        tl.debug_barrier()  # all threads have read the state
        _move_state(
            end, begin, x, x, state, channels, is_channel, x_stride, x_stride, state_stride,
            computed > 0, False, TAPS,
        )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize_on_alignment=ROW_TABLES)
def _conv_walk_kernel(
    out,
    x,
    gate_in,
    gate_out,
    weight,
    bias,
    state,
    state_offsets,
    cu_query_lens,
    lens,
    num_channels,
    out_stride,
    x_stride,
    in_stride,
    gate_stride,
    weight_stride,
    unit_stride,
    state_stride,
    offset_stride,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GATES: tl.constexpr,
    HAS_SILU: tl.constexpr,
    IS_AFTER: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Walk over the few tokens of a row for BLOCK channels, then move its state."""
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channels < num_channels
    row = tl.program_id(1)
    unit = tl.load(state_offsets + row * offset_stride).to(tl.int64)
    begin, end, computed = load_row(row, cu_query_lens, lens, IS_AFTER)
    if begin >= end:
        return
    if computed < 0:  # a padding row
        for token in range(begin, end):
            zeros = tl.zeros([BLOCK], out.dtype.element_ty)
            tl.store(out + tl.cast(token, tl.int64) * out_stride + channels, zeros, mask=is_channel)
        return
    has_state = computed > 0
    state += unit * unit_stride
    for token in range(begin, end):
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(TAPS):
            value = _load_input(
                token - (TAPS - 1) + tap, begin, x, gate_in, state, channels, is_channel,
                x_stride, in_stride, state_stride, has_state, HAS_GATES, TAPS,
            )  # fmt: skip
            factor = tl.load(weight + tap * weight_stride + channels, mask=is_channel, other=0.0)
            total += value.to(tl.float32) * factor.to(tl.float32)
        dtype = out.dtype.element_ty
        result = _finish(total, bias, channels, is_channel, dtype, HAS_BIAS, HAS_SILU)
        place = tl.cast(token, tl.int64)
        if HAS_GATES:
            after = tl.load(gate_out + place * gate_stride + channels, mask=is_channel, other=0.0)
            result = (result.to(tl.float32) * after.to(tl.float32)).to(dtype)
        tl.store(out + place * out_stride + channels, result, mask=is_channel)
    _move_state(
        end, begin, x, gate_in, state, channels, is_channel, x_stride, in_stride, state_stride,
        has_state, HAS_GATES, TAPS,
    )  # fmt: skip


def _walk(
    out_TC: Tensor,
    x_TC: Tensor,
    gates: tuple[Tensor, Tensor] | None,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    state: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    *,
    is_after: bool,
    silu: bool,
) -> None:
    num_channels = x_TC.shape[1]
    gate_in, gate_out = (x_TC, x_TC) if gates is None else gates
    is_overlapped = overlaps(x_TC.device)
    _conv_walk_kernel[cdiv(num_channels, _BLOCK), rows[0].shape[0]](
        out_TC, x_TC, gate_in, gate_out, weight_CK, bias_C, state, *rows, num_channels,
        out_TC.stride(0), x_TC.stride(0), gate_in.stride(0), gate_out.stride(0),
        weight_CK.stride(1), state.stride(0), state.stride(2), rows[0].stride(0),
        TAPS=weight_CK.shape[1],
        HAS_BIAS=bias_C is not None,
        HAS_GATES=gates is not None,
        HAS_SILU=silu,
        IS_AFTER=is_after,
        OVERLAPS=is_overlapped,
        BLOCK=_BLOCK,
        num_warps=1,
        launch_pdl=is_overlapped,
    )  # fmt: skip


def causal_conv1d(
    out_TC: Tensor,
    x_TC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    state: Tensor,
    state_offsets: Tensor,
    cu_query_lens: Tensor,
    num_computed: Tensor,
    silu: bool,
) -> None:
    """See the door."""
    num_tokens, num_channels = x_TC.shape
    num_rows = state_offsets.shape[0]
    if not num_tokens or not num_rows:
        return
    rows = (state_offsets, cu_query_lens, num_computed)
    if is_single_step(num_tokens, cu_query_lens):
        _walk(out_TC, x_TC, None, weight_CK, bias_C, state, rows, is_after=False, silu=silu)
        return
    grid = cdiv(num_channels, _BLOCK), count_places(num_tokens, num_rows, _CHUNK)
    _conv_chunk_kernel[grid](
        out_TC, x_TC, weight_CK, bias_C, state, *rows, num_rows, num_channels,
        out_TC.stride(0), x_TC.stride(0), weight_CK.stride(1), state.stride(0), state.stride(2),
        state_offsets.stride(0),
        TAPS=weight_CK.shape[1],
        HAS_BIAS=bias_C is not None,
        HAS_SILU=silu,
        CHUNK=_CHUNK,
        BLOCK=_BLOCK,
        num_warps=_CHUNK_WARPS,
    )  # fmt: skip


def causal_conv1d_step(
    out_TC: Tensor,
    x_TC: Tensor,
    gate_in_TC: Tensor | None,
    gate_out_TC: Tensor | None,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    state: Tensor,
    state_offsets: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    silu: bool,
) -> None:
    """See the door."""
    if not x_TC.shape[0] or not state_offsets.shape[0]:
        return
    gates = None
    if gate_in_TC is not None and gate_out_TC is not None:
        gates = (gate_in_TC, gate_out_TC)
    rows = (state_offsets, cu_query_lens, seq_lens)
    _walk(out_TC, x_TC, gates, weight_CK, bias_C, state, rows, is_after=True, silu=silu)


OPS = {"causal_conv1d": causal_conv1d, "causal_conv1d_step": causal_conv1d_step}
SCHEMAS = {
    "causal_conv1d_step": (
        "causal_conv1d_step(Tensor! out, Tensor x, Tensor? gate_in, Tensor? gate_out, "
        "Tensor weight, Tensor? bias, Tensor! state, Tensor state_offsets, Tensor cu_query_lens, "
        "Tensor seq_lens, bool silu) -> ()"
    )
}
