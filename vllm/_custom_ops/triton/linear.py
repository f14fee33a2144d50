"""Products of few rows with a weight on a GPU: the decode step's linears. Triton.

Registered by `table.py`; doors in `_custom_ops/linear.py`, forms in `linear_table.py`. Such a
product costs what reading the weight costs, so programs stream it once, side by side in N and,
where N has too few tiles, in K; the last program of a tile to arrive adds up the parts of K in
their order, so that results do not depend on who is last. `skinny_linear_parts` leaves the parts
to the kernel that comes next, which reads its input anyway. Where `stream_table.py` says so, the
kernel of `stream_hopper.py` runs instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.arrival import NUM_COUNTERS, get_counters, is_last_to_arrive
from vllm._custom_ops.triton.device import count_processors, fit_stages, has_warp_group_products
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.linear_table import (
    MAX_ROWS,
    SkinnyConfig,
    choose_config,
    count_splits,
    is_streamed,
)
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm._custom_ops.triton.product import (
    activate,
    multiply_row,
    multiply_tile,
)
from vllm._custom_ops.triton.stream_hopper import can_stream, stream_gated, stream_parts
from vllm._custom_ops.triton.stream_table import (
    choose_gated_tile,
    choose_tile,
)
from vllm.errors import ShapeError
from vllm.utils.math import cdiv, next_power

GATED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
RELU2 = "relu2"
_PLAIN = ""
_SMALLEST_TILE = 16


@triton.jit
def _store_result(
    out,
    x,
    bias,
    gate,
    up,
    rows_T,
    rows_N,
    is_in,
    N,
    out_stride,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    if bias is not None:
        gate += tl.load(bias + rows_N, mask=rows_N < N, other=0.0).to(tl.float32)[None, :]
    result = gate.to(x.dtype.element_ty)
    if ACTIVATION != "":
        if IS_GATED and bias is not None:
            up += tl.load(bias + N + rows_N, mask=rows_N < N, other=0.0).to(tl.float32)[None, :]
        result = activate(result, up.to(x.dtype.element_ty), 0.0, 0.0, ACTIVATION)
    places = rows_T[:, None].to(tl.int64) * out_stride + rows_N[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def _sum_parts(places, stride, num_parts, is_in):
    total = tl.load(places, mask=is_in, other=0.0, cache_modifier=".cg")
    for part in range(1, num_parts):
        total += tl.load(places + part * stride, mask=is_in, other=0.0, cache_modifier=".cg")
    return total


@fast_launch
@triton.jit(do_not_specialize=["num_rows", "num_splits", "split_blocks"])
def _skinny_kernel(
    out,
    x,
    weight,
    bias,
    parts,
    counters,
    num_rows,
    N,
    K,
    x_stride,
    out_stride,
    num_splits,
    split_blocks,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_VECTOR: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    rows_T, rows_N = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(rows_N, N - 1)  # those outside are read again and not stored
    first = split * (split_blocks * BLOCK_K)
    end = tl.minimum(first + split_blocks * BLOCK_K, K)
    await_inputs(OVERLAPS)
    if IS_VECTOR:
        gate, up = multiply_row(
            x, weight, rows, rows + N, first, end, K, IS_GATED, EVEN_K, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
    else:
        starts = rows_T.to(tl.int64) * x_stride
        gate, up = multiply_tile(
            x, starts, rows_T < num_rows, weight, rows, rows + N, first, end, K,
            IS_GATED, IS_SWAPPED, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    let_next_start(OVERLAPS)  # not before: what waits takes room from programs that multiply
    is_in = (rows_T < num_rows)[:, None] & (rows_N < N)[None, :]
    if parts is None:
        _store_result(
            out, x, bias, gate, up, rows_T, rows_N, is_in, N, out_stride, ACTIVATION, IS_GATED
        )  # fmt: skip
    else:  # parts: [splits, T, N] of the gate, then of up
        places = parts + rows_T[:, None] * N + rows_N[None, :]
        size = num_rows * N
        up_places = places + num_splits * size
        tl.store(places + split * size, gate, mask=is_in)
        if IS_GATED:
            tl.store(up_places + split * size, up, mask=is_in)
        if counters is not None:  # noqa: SIM102 the compiler's, then the device's
            if is_last_to_arrive(counters + tile, num_splits):
                total = _sum_parts(places, size, num_splits, is_in)
                up_total = total
                if IS_GATED:
                    up_total = _sum_parts(up_places, size, num_splits, is_in)
                _store_result(
                    out, x, bias, total, up_total, rows_T, rows_N, is_in, N, out_stride,
                    ACTIVATION, IS_GATED,
                )  # fmt: skip


def launch_skinny(
    out_TN: Tensor,
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    activation: str,
    config: SkinnyConfig,
) -> None:
    """Run the kernel in a given form; benchmarks and tests choose it.

    Args:
        out_TN, x_TK, weight_NK, bias_N: as in the doors.
        activation: of GATED_ACTIVATIONS, then the weight has gate rows, then as many up rows; or
            RELU2, or "" for none.
        config: the form.
    """
    (num_rows, num_outputs), k = out_TN.shape, x_TK.shape[1]
    is_gated = activation in GATED_ACTIVATIONS
    splits = count_splits(config, num_outputs, k, count_processors(x_TK.device))
    parts = None
    if splits[0] > 1:
        num_tiles = cdiv(num_outputs, config.block_n)
        assert num_tiles <= NUM_COUNTERS, "a weight of so many tiles is not split"
        num_parts = splits[0] * (2 if is_gated else 1)
        parts = x_TK.new_empty(num_parts, num_rows, num_outputs, dtype=torch.float32)
    tensors = (out_TN, x_TK, weight_NK, bias_N, parts, get_counters(x_TK.device))
    _launch(tensors, num_outputs, splits, out_TN.stride(0), activation, config)


def launch_parts(parts_PTN: Tensor, x_TK: Tensor, weight_NK: Tensor, config: SkinnyConfig) -> None:
    """Run the kernel in a given form, which leaves its parts; arguments as in the door."""
    num_parts, _, num_outputs = parts_PTN.shape
    splits = num_parts, cdiv(cdiv(x_TK.shape[1], config.block_k), num_parts)
    tensors = (None, x_TK, weight_NK, None, parts_PTN, None)
    _launch(tensors, num_outputs, splits, 0, _PLAIN, config)


def _launch(
    tensors: tuple[Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    num_outputs: int,
    splits: tuple[int, int],
    out_stride: int,
    activation: str,
    config: SkinnyConfig,
) -> None:
    """Launch with out, x, weight, bias, parts and counters; splits as of `count_splits`."""
    x_TK = tensors[1]
    num_rows, k = x_TK.shape
    has_overlap, is_gated = overlaps(x_TK.device), activation in GATED_ACTIVATIONS
    block_m = 1 if config.is_vector else max(_SMALLEST_TILE, next_power(num_rows))
    rows_K = block_m + config.block_n * (2 if is_gated else 1)
    tile_bytes = rows_K * config.block_k * x_TK.element_size()
    num_stages = fit_stages(config.num_stages, tile_bytes, 0, x_TK.device)
    _skinny_kernel[(cdiv(num_outputs, config.block_n), splits[0])](
        *tensors,
        num_rows,
        num_outputs,
        k,
        x_TK.stride(0),
        out_stride,
        *splits,
        ACTIVATION=activation,
        IS_GATED=is_gated,
        IS_VECTOR=config.is_vector,
        IS_SWAPPED=config.is_swapped,
        EVEN_K=k % config.block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=num_stages,
        OVERLAPS=has_overlap,
        num_warps=config.num_warps,
        num_stages=num_stages,
        launch_pdl=has_overlap,
    )


def _choose_form(x_TK: Tensor, num_outputs: int, *, is_gated: bool) -> SkinnyConfig:
    num_rows, k = x_TK.shape
    has_warp_groups = has_warp_group_products(x_TK.device)
    return choose_config(
        num_rows, num_outputs, k, is_gated=is_gated, has_warp_groups=has_warp_groups
    )


def skinny_linear(
    out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None
) -> None:
    """See the door."""
    _check("skinny_linear", out_TN, x_TK, weight_NK, bias_N, parts=1)
    if x_TK.shape[0] == 0:
        return
    config = _choose_form(x_TK, out_TN.shape[1], is_gated=False)
    launch_skinny(out_TN, x_TK, weight_NK, bias_N, _PLAIN, config)


def skinny_gated_linear(
    out_TI: Tensor, x_TK: Tensor, weight_2IK: Tensor, bias_2I: Tensor | None, activation: str
) -> None:
    """See the door."""
    if activation not in GATED_ACTIVATIONS:
        raise ShapeError(
            f"skinny_gated_linear: activation is {activation!r}, allowed: "
            + ", ".join(GATED_ACTIVATIONS)
        )
    _check("skinny_gated_linear", out_TI, x_TK, weight_2IK, bias_2I, parts=2)
    if x_TK.shape[0] == 0:
        return
    sizes = x_TK.shape[0], out_TI.shape[1], x_TK.shape[1]
    if bias_2I is None and can_stream(x_TK, weight_2IK):
        tile = choose_gated_tile(*sizes[1:], count_processors(x_TK.device))
        if tile is not None:
            stream_gated(out_TI, x_TK, weight_2IK, activation, tile)
            return
    config = _choose_form(x_TK, out_TI.shape[1], is_gated=True)
    launch_skinny(out_TI, x_TK, weight_2IK, bias_2I, activation, config)


def skinny_relu2_linear(
    out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None
) -> None:
    """See the door."""
    _check("skinny_relu2_linear", out_TN, x_TK, weight_NK, bias_N, parts=1)
    if x_TK.shape[0] == 0:
        return
    config = _choose_form(x_TK, out_TN.shape[1], is_gated=False)
    launch_skinny(out_TN, x_TK, weight_NK, bias_N, RELU2, config)


def skinny_linear_parts(parts_PTN: Tensor, x_TK: Tensor, weight_NK: Tensor) -> None:
    """See the door."""
    op = "skinny_linear_parts"
    if parts_PTN.dim() != 3 or not parts_PTN.is_contiguous() or parts_PTN.shape[0] == 0:
        raise ShapeError(f"{op}: parts must be contiguous, [parts, rows, outputs]")
    if parts_PTN.dtype != torch.float32:
        raise ShapeError(f"{op}: parts are {parts_PTN.dtype}, expected {torch.float32}")
    _check(op, parts_PTN[0], x_TK, weight_NK, None, parts=1)
    if x_TK.shape[0] == 0:
        return
    sizes = x_TK.shape[0], parts_PTN.shape[2], x_TK.shape[1]
    num_sms = count_processors(x_TK.device)
    if can_stream(x_TK, weight_NK) and is_streamed(*sizes, num_sms):
        stream_parts(parts_PTN, x_TK, weight_NK, choose_tile(*sizes, num_sms))
        return
    config = _choose_form(x_TK, parts_PTN.shape[2], is_gated=False)
    launch_parts(parts_PTN, x_TK, weight_NK, config)


def _check(
    op: str, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, parts: int
) -> None:
    if out.dim() != 2 or x.dim() != 2 or weight.dim() != 2:
        raise ShapeError(f"{op}: out, x and weight must be matrices")
    num_rows, k = x.shape
    if num_rows > MAX_ROWS:
        raise ShapeError(f"{op}: x has {num_rows} rows, allowed: up to {MAX_ROWS}")
    if weight.shape != (parts * out.shape[1], k) or out.shape[0] != num_rows:
        raise ShapeError(
            f"{op}: out {list(out.shape)}, x {list(x.shape)} and weight {list(weight.shape)} do "
            "not fit each other"
        )
    if not weight.is_contiguous() or x.stride(1) != 1 or out.stride(1) != 1:
        raise ShapeError(f"{op}: weight must be contiguous, rows of x and out too")
    if weight.dtype != x.dtype or out.dtype not in (x.dtype, torch.float32):
        raise ShapeError(
            f"{op}: weight is {weight.dtype}, expected {x.dtype}; out is {out.dtype}, expected "
            f"{x.dtype} or {torch.float32}"
        )
    if bias is not None and (bias.shape != (weight.shape[0],) or bias.dtype != x.dtype):
        raise ShapeError(
            f"{op}: bias is {bias.dtype} {list(bias.shape)}, expected {x.dtype} [{weight.shape[0]}]"
        )


OPS = {
    "skinny_linear": skinny_linear,
    "skinny_gated_linear": skinny_gated_linear,
    "skinny_relu2_linear": skinny_relu2_linear,
    "skinny_linear_parts": skinny_linear_parts,
}
SCHEMAS = {
    "skinny_linear": "skinny_linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()",
    "skinny_gated_linear": (
        "skinny_gated_linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, "
        "str activation) -> ()"
    ),
    "skinny_relu2_linear": (
        "skinny_relu2_linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()"
    ),
    "skinny_linear_parts": ("skinny_linear_parts(Tensor(a!) parts, Tensor x, Tensor weight) -> ()"),
}
