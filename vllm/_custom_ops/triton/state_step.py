"""The second of the two launches of a decode step in a layer with a state.

Called by `mamba2_step.py` and `delta_step.py`. Their kernels convolve what they need of a token on
their own, several of them the same channels, so that none may move the state of the convolution.
This kernel does that, beside the gated norm, which waits for all heads of a group.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.causal_conv import load_window
from vllm._custom_ops.triton.gated_norm import NORM_TILE, norm_gated
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm._custom_ops.triton.state_rows import ROW_TABLES, load_row
from vllm.errors import ShapeError
from vllm.utils.math import cdiv, next_power

_CHANNELS = 1024  # of a program that moves a state
_WARPS = 4


@fast_launch
@triton.jit(do_not_specialize_on_alignment=ROW_TABLES)
def _finish_step_kernel(
    out,
    gate,
    norm_weight,
    x,
    conv_state,
    state_offsets,
    cu_query_lens,
    lens,
    epsilon,
    norm_programs,
    num_groups,
    num_channels,
    out_stride,
    gate_stride,
    x_stride,
    unit_stride,
    state_stride,
    offset_stride,
    TAPS: tl.constexpr,
    SIZE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Norm GROUPS groups of a row's token, or move CHANNELS of its convolution's state."""
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    row = tl.program_id(1)
    begin, end, computed = load_row(row, cu_query_lens, lens, True)
    if (begin >= end) | (computed < 0):  # a padding row, whose output is zero
        return
    token = begin.to(tl.int64)
    part = tl.program_id(0)
    if part < norm_programs:
        group = part * GROUPS + tl.arange(0, GROUPS)[:, None]
        at = tl.arange(0, BLOCK)[None, :]
        mask = (group < num_groups) & (at < SIZE)
        column = group * SIZE + at
        scale = tl.load(norm_weight + group * WEIGHT_STRIDE + at, mask=mask, other=0.0)
        factor = tl.load(gate + token * gate_stride + column, mask=mask, other=0.0)
        own = out + token * out_stride + column
        value = tl.load(own, mask=mask, other=0.0)
        tl.store(own, norm_gated(value, factor, scale, epsilon, SIZE, GATE_FIRST), mask=mask)
    else:
        channels = (part - norm_programs) * CHANNELS + tl.arange(0, CHANNELS)
        is_channel = channels < num_channels
        unit = tl.load(state_offsets + row * offset_stride).to(tl.int64)
        state = conv_state + unit * unit_stride + channels
        newest = tl.load(x + token * x_stride + channels, mask=is_channel, other=0.0)
        old = load_window(state, 0, is_channel & (computed > 0), state_stride, TAPS)
        tl.debug_barrier()  # all threads have read the state
        for tap in tl.static_range(TAPS - 2):
            tl.store(state + tap * state_stride, old[tap + 1], mask=is_channel)
        tl.store(state + (TAPS - 2) * state_stride, newest, mask=is_channel)


def check_step(
    op: str,
    heads: Mapping[str, Tensor | None],
    channels: Mapping[str, Tensor],
    state: Tensor,
) -> None:
    """Check what the kernels take for granted of the places of elements.

    Args:
        op: its name.
        heads: tensors [T, ...] that are read or written across the heads of a token.
        channels: tensors whose channels, the dimension before the last, are neighbours.
        state: [units, ...], each unit contiguous.

    Raises:
        ShapeError: an element is not where it is looked for.
    """
    for name, x in heads.items():
        if x is not None and not _has_neighbours(x):
            raise ShapeError(
                f"{op}: the heads of {name} must lie behind each other, its strides are "
                f"{x.stride()} at a shape of {tuple(x.shape)}"
            )
    for name, x in channels.items():
        if x.stride(-2) != 1:
            raise ShapeError(f"{op}: {name} must be contiguous in C, its strides are {x.stride()}")
    if not state[0].is_contiguous():
        raise ShapeError(f"{op}: each unit of state must be contiguous, not {state.stride()}")


def _has_neighbours(x: Tensor) -> bool:
    """Whether the elements of a token, [C] or [H, P], lie behind each other."""
    return x.stride(-1) == 1 and (x.dim() == 2 or x.shape[1] == 1 or x.stride(1) == x.shape[2])


def finish_step(
    out_THP: Tensor,
    x_TC: Tensor,
    conv_state: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    norm: tuple[Tensor, Tensor] | None,
    epsilon: float,
    *,
    group_size: int,
    gate_first: bool,
) -> None:
    """Norm the outputs of rows of one token in place, and move the states of their convolution.

    Args:
        out_THP: outputs of the heads, such that `check_step` takes them.
        x_TC: inputs of the convolution.
        conv_state: [units, C, K - 1], as in `causal_conv1d`.
        rows: state_offsets, cu_query_lens and seq_lens.
        norm: gate, as the outputs, and weight; or None, and the outputs stay.
        group_size: as in `gated_rms_norm`.
    """
    num_channels, size = x_TC.shape[1], out_THP[0].numel()
    gate, weight = (out_THP, out_THP) if norm is None else norm
    block = next_power(group_size)
    groups = max(1, NORM_TILE // block)
    norm_programs = 0 if norm is None else cdiv(size // group_size, groups)
    is_overlapped = overlaps(out_THP.device)
    _finish_step_kernel[norm_programs + cdiv(num_channels, _CHANNELS), rows[0].shape[0]](
        out_THP, gate, weight, x_TC, conv_state, *rows, epsilon, norm_programs,
        size // group_size, num_channels, out_THP.stride(0), gate.stride(0), x_TC.stride(0),
        conv_state.stride(0), conv_state.stride(2), rows[0].stride(0),
        TAPS=conv_state.shape[2] + 1,
        SIZE=group_size,
        WEIGHT_STRIDE=0 if norm is None or weight.shape[0] == group_size else group_size,
        GATE_FIRST=gate_first,
        GROUPS=groups,
        OVERLAPS=is_overlapped,
        BLOCK=block,
        CHANNELS=_CHANNELS,
        num_warps=_WARPS,
        launch_pdl=is_overlapped,
    )  # fmt: skip
