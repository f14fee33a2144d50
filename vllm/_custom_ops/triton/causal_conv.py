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
from vllm._custom_ops.triton.rounding import round_to, silu
from vllm._custom_ops.triton.state_rows import (
    ROW_TABLES,
    count_places,
    find_row,
    is_single_step,
    load_row,
)
from vllm.utils.math import cdiv

_CHUNK = 16  # tokens of a program; at least TAPS - 1, so that a row's first chunk alone reads state
_BLOCK_BYTES = 512  # of channels in a program of one warp: 16 bytes a thread, the widest load


@triton.jit
def load_window(state, channels, mask, state_stride, TAPS: tl.constexpr):
    """Return the TAPS - 1 inputs that a state remembers, oldest first; zeros where masked."""
    window = ()  # type: tuple[tl.tensor, ...]
    for tap in tl.static_range(TAPS - 1):
        value = tl.load(state + tap * state_stride + channels, mask=mask, other=0.0)
        window = window + (value,)  # noqa: RUF005 - the compiler knows no stars
    return window


@triton.jit
def load_filter(
    weight, bias, channels, is_channel, weight_stride, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Return the taps of each channel in float32, and its bias behind them."""
    numbers = ()  # type: tuple[tl.tensor, ...]
    for tap in tl.static_range(TAPS):
        factor = tl.load(weight + tap * weight_stride + channels, mask=is_channel, other=0.0)
        numbers = numbers + (factor.to(tl.float32),)  # noqa: RUF005
    if HAS_BIAS:
        added = tl.load(bias + channels, mask=is_channel, other=0.0)
        numbers = numbers + (added.to(tl.float32),)  # noqa: RUF005
    return numbers


@triton.jit
def convolve(
    inputs,
    numbers,
    FIRST: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
):
    """Return the sum over TAPS of `inputs` from FIRST on, with bias and activation.

    Rounded after each to the type of the inputs. `numbers` are those of `load_filter`.
    """
    dtype: tl.constexpr = inputs[FIRST].dtype
    total = inputs[FIRST].to(tl.float32) * numbers[0]
    for tap in tl.static_range(1, TAPS):
        total += inputs[FIRST + tap].to(tl.float32) * numbers[tap]
    if HAS_BIAS:
        total += numbers[TAPS]
    if HAS_SILU:
        total = silu(round_to(total, dtype))
    return total.to(dtype)


@triton.jit
def convolve_token(
    x,
    weight,
    bias,
    state,
    channels,
    is_channel,
    weight_stride,
    state_stride,
    has_state,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Return some channels of one token, with activation, in float32; the state stays."""
    numbers = load_filter(weight, bias, channels, is_channel, weight_stride, TAPS, HAS_BIAS)
    window = load_window(state, channels, is_channel & has_state, state_stride, TAPS)
    value = tl.load(x + channels, mask=is_channel, other=0.0)
    window = window + (value,)  # noqa: RUF005
    return convolve(window, numbers, 0, TAPS, HAS_BIAS, True).to(tl.float32)


@triton.jit
def _load_input(
    token,
    begin,
    x,
    state,
    channels,
    is_channel,
    x_stride,
    state_stride,
    has_state,
    TAPS: tl.constexpr,
):
    """Return the input `token` of a row; before its first token, what the state remembers."""
    is_new = token >= begin
    fresh = x + tl.cast(token, tl.int64) * x_stride + channels
    fresh = tl.load(fresh, mask=is_channel & is_new, other=0.0)
    old = state + (token - begin + TAPS - 1) * state_stride + channels
    old = tl.load(old, mask=is_channel & (token < begin) & has_state, other=0.0)
    return tl.where(is_new, fresh, old)


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

    Only a row's first chunk reads the old state, since CHUNK is at least TAPS - 1. All inputs are
    asked for before the first is waited for, each once, and lie in registers.
    """
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channels < num_channels
    numbers = load_filter(weight, bias, channels, is_channel, weight_stride, TAPS, HAS_BIAS)
    row, chunk = find_row(tl.program_id(1), cu_query_lens, num_rows, CHUNK)
    begin, end, computed = load_row(row, cu_query_lens, num_computed, False)
    first = begin + chunk * CHUNK
    if first >= end:
        return
    state += tl.load(state_offsets + row * offset_stride).to(tl.int64) * unit_stride
    inputs = ()  # type: tuple[tl.tensor, ...]
    for tap in tl.static_range(TAPS - 1):
        value = _load_input(
            first - (TAPS - 1) + tap, begin, x, state, channels, is_channel, x_stride,
            state_stride, computed > 0, TAPS,
        )  # fmt: skip
        inputs = inputs + (value,)  # noqa: RUF005
    source = x + first.to(tl.int64) * x_stride + channels
    target = out + first.to(tl.int64) * out_stride + channels
    for i in tl.static_range(CHUNK):  # what lies behind the row's end is not stored
        value = tl.load(source + i * x_stride, mask=is_channel & (first + i < end))
        inputs = inputs + (value,)  # noqa: RUF005
    for i in tl.static_range(CHUNK):
        result = convolve(inputs, numbers, i, TAPS, HAS_BIAS, HAS_SILU)
        tl.store(target + i * out_stride, result, mask=is_channel & (first + i < end))
    if chunk == 0:
        for tap in tl.static_range(TAPS - 1):  # upwards: what is read lies above what is written
            value = _load_input(
                end - (TAPS - 1) + tap, begin, x, state, channels, is_channel, x_stride,
                state_stride, computed > 0, TAPS,
            )  # fmt: skip
            tl.debug_barrier()  # all threads have read before one overwrites
            tl.store(state + tap * state_stride + channels, value, mask=is_channel)


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
    """Walk over the few tokens of a row for BLOCK channels with its last inputs in registers."""
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channels < num_channels
    numbers = load_filter(weight, bias, channels, is_channel, weight_stride, TAPS, HAS_BIAS)
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
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
    state += unit * unit_stride
    window = load_window(state, channels, is_channel & (computed > 0), state_stride, TAPS)
    num_steps = 1 if IS_AFTER else end - begin  # a loop of one turn is none and takes less
    for index in range(0, num_steps):
        token = (begin + index).to(tl.int64)
        value = tl.load(x + token * x_stride + channels, mask=is_channel, other=0.0)
        if HAS_GATES:
            before = tl.load(gate_in + token * in_stride + channels, mask=is_channel, other=0.0)
            value = (value.to(tl.float32) * before.to(tl.float32)).to(value.dtype)
        window = window + (value,)  # noqa: RUF005
        result = convolve(window, numbers, 0, TAPS, HAS_BIAS, HAS_SILU)
        window = window[1:]
        if HAS_GATES:
            after = tl.load(gate_out + token * gate_stride + channels, mask=is_channel, other=0.0)
            result = (result.to(tl.float32) * after.to(tl.float32)).to(result.dtype)
        tl.store(out + token * out_stride + channels, result, mask=is_channel)
    tl.debug_barrier()  # all threads have read the state
    for tap in tl.static_range(TAPS - 1):
        tl.store(state + tap * state_stride + channels, window[tap], mask=is_channel)


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
    num_channels, block = x_TC.shape[1], _BLOCK_BYTES // x_TC.element_size()
    gate_in, gate_out = (x_TC, x_TC) if gates is None else gates
    is_overlapped = overlaps(x_TC.device)
    _conv_walk_kernel[cdiv(num_channels, block), rows[0].shape[0]](
        out_TC, x_TC, gate_in, gate_out, weight_CK, bias_C, state, *rows, num_channels,
        out_TC.stride(0), x_TC.stride(0), gate_in.stride(0), gate_out.stride(0),
        weight_CK.stride(1), state.stride(0), state.stride(2), rows[0].stride(0),
        TAPS=weight_CK.shape[1],
        HAS_BIAS=bias_C is not None,
        HAS_GATES=gates is not None,
        HAS_SILU=silu,
        IS_AFTER=is_after,
        OVERLAPS=is_overlapped,
        BLOCK=block,
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
    block = _BLOCK_BYTES // x_TC.element_size()
    grid = cdiv(num_channels, block), count_places(num_tokens, num_rows, _CHUNK)
    _conv_chunk_kernel[grid](
        out_TC, x_TC, weight_CK, bias_C, state, *rows, num_rows, num_channels,
        out_TC.stride(0), x_TC.stride(0), weight_CK.stride(1), state.stride(0), state.stride(2),
        state_offsets.stride(0),
        TAPS=weight_CK.shape[1],
        HAS_BIAS=bias_C is not None,
        HAS_SILU=silu,
        CHUNK=_CHUNK,
        BLOCK=block,
        num_warps=1,
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
