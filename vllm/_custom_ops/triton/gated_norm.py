"""Triton twin of `gated_rms_norm`.

Registered by `table.py`, called through the door of `_custom_ops/state_space.py`. Sums in float32;
rounds where the naive twin does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm._custom_ops.triton.rounding import round_to, silu
from vllm.utils.math import cdiv, next_power

NORM_TILE = 1024  # numbers of a program, in whole groups


@triton.jit
def norm_gated(value, gate, scale, epsilon, SIZE: tl.constexpr, GATE_FIRST: tl.constexpr):
    """Norm and gate rows of SIZE numbers, a group each; rounded to the type of `value`."""
    dtype: tl.constexpr = value.dtype
    value, factor = value.to(tl.float32), silu(gate.to(tl.float32))
    if GATE_FIRST:
        value *= factor
    mean = tl.sum(value * value, axis=1) / SIZE
    value = round_to(value * tl.rsqrt(mean + epsilon)[:, None], dtype) * scale.to(tl.float32)
    if not GATE_FIRST:
        value = round_to(value, dtype) * factor
    return value.to(dtype)


@fast_launch
@triton.jit(do_not_specialize=["num_groups"])
def _gated_norm_kernel(
    out,
    x,
    gate,
    weight,
    epsilon,
    num_groups,
    groups_per_token,
    out_stride,
    x_stride,
    gate_stride,
    SIZE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Norm GROUPS groups of SIZE channels; they are numbered token by token."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    token = (group // groups_per_token).to(tl.int64)[:, None]
    of_token = (group % groups_per_token)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    mask = (group < num_groups)[:, None] & (channel < SIZE)
    column = of_token * SIZE + channel
    scale = tl.load(weight + of_token * WEIGHT_STRIDE + channel, mask=mask, other=0.0)
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    value = tl.load(x + token * x_stride + column, mask=mask, other=0.0)
    factor = tl.load(gate + token * gate_stride + column, mask=mask, other=0.0)
    result = norm_gated(value, factor, scale, epsilon, SIZE, GATE_FIRST)
    tl.store(out + token * out_stride + column, result, mask=mask)


def gated_rms_norm(
    out_TC: Tensor,
    x_TC: Tensor,
    gate_TC: Tensor,
    weight: Tensor,
    epsilon: float,
    group_size: int,
    gate_first: bool,
) -> None:
    """See the door."""
    num_tokens, num_channels = x_TC.shape
    if not num_tokens:
        return
    block = next_power(group_size)
    groups = max(1, NORM_TILE // block)
    groups_per_token = num_channels // group_size
    num_groups = num_tokens * groups_per_token
    is_overlapped = overlaps(x_TC.device)
    _gated_norm_kernel[(cdiv(num_groups, groups),)](
        out_TC,
        x_TC,
        gate_TC,
        weight,
        epsilon,
        num_groups,
        groups_per_token,
        out_TC.stride(0),
        x_TC.stride(0),
        gate_TC.stride(0),
        SIZE=group_size,
        WEIGHT_STRIDE=0 if weight.shape[0] == group_size else group_size,
        GATE_FIRST=gate_first,
        GROUPS=groups,
        BLOCK=block,
        OVERLAPS=is_overlapped,
        launch_pdl=is_overlapped,
        num_warps=4 if block <= 2048 else 8,
    )


OPS = {"gated_rms_norm": gated_rms_norm}
SCHEMAS: dict[str, str] = {}
