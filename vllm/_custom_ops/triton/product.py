"""Parts of kernels that multiply rows by weights: the loops over K, the activations.

Called by the kernels of `linear.py` and `moe.py`. Sums are float32 and run over K in rising order;
rows and columns outside are not read. Weights are row-major with K elements a row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(places, columns, K, EVEN_K: tl.constexpr):
    mask = None if EVEN_K else (columns < K)[None, :]
    other = None if EVEN_K else 0.0
    return tl.load(places, mask=mask, other=other)


@triton.jit
def multiply_row(
    x,
    weight,
    rows_N,
    up_rows_N,
    first,
    end,
    K,
    IS_GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the products of one row with weight rows `rows_N` and `up_rows_N`, each [1, N].

    No tensor cores: what bounds one row is how many loads are on their way. The row is loaded once
    for each weight row, out of the nearest cache, so that it needs no change of layout.
    """
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = gate
    lanes = tl.arange(0, BLOCK_K)
    x_places = x + lanes[None, :] + tl.zeros((BLOCK_N, 1), tl.int32)
    places = weight + rows_N[:, None].to(tl.int64) * K + lanes[None, :]
    up_places = weight + up_rows_N[:, None].to(tl.int64) * K + lanes[None, :]
    for k in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        columns = k + lanes
        x_NK = _load(x_places + k, columns, K, EVEN_K).to(tl.float32)
        gate += _load(places + k, columns, K, EVEN_K).to(tl.float32) * x_NK
        if IS_GATED:
            up += _load(up_places + k, columns, K, EVEN_K).to(tl.float32) * x_NK
    return tl.sum(gate, 1)[None, :], tl.sum(up, 1)[None, :]


@triton.jit
def _dot(x_MK, w_NK, sums, IS_SWAPPED: tl.constexpr):
    if IS_SWAPPED:
        sums = tl.dot(w_NK, tl.trans(x_MK), sums, input_precision="ieee")
    else:
        sums = tl.dot(x_MK, tl.trans(w_NK), sums, input_precision="ieee")
    return sums


@triton.jit
def multiply_tile(
    x,
    x_starts_M,
    is_row_M,
    weight,
    rows_N,
    up_rows_N,
    first,
    end,
    K,
    IS_GATED: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the products of rows with weight rows `rows_N` and `up_rows_N`, each [M, N].

    `x_starts_M` (int64) says where in `x` each row starts; rows that are none (`is_row_M`) count as
    zero and are not read. If IS_SWAPPED, weight rows are the tensor cores' M, which is never less
    than 64 on Hopper.
    """
    if IS_SWAPPED:
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = gate
    lanes = tl.arange(0, BLOCK_K)
    x_places = x + x_starts_M[:, None] + lanes[None, :]
    places = weight + rows_N[:, None].to(tl.int64) * K + lanes[None, :]
    up_places = weight + up_rows_N[:, None].to(tl.int64) * K + lanes[None, :]
    for k in range(first, end, BLOCK_K):
        columns = k + lanes
        if EVEN_K:
            x_MK = tl.load(x_places + k, mask=is_row_M[:, None], other=0.0)
        else:
            is_in = is_row_M[:, None] & (columns < K)[None, :]
            x_MK = tl.load(x_places + k, mask=is_in, other=0.0)
        gate = _dot(x_MK, _load(places + k, columns, K, EVEN_K), gate, IS_SWAPPED)
        if IS_GATED:
            up = _dot(x_MK, _load(up_places + k, columns, K, EVEN_K), up, IS_SWAPPED)
    if IS_SWAPPED:
        gate, up = tl.trans(gate), tl.trans(up)
    return gate, up


@triton.jit
def activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """Return what follows from the first product's elements, rounded where the twins round.

    `gate` and `up` are rounded to the element type. ACTIVATION is "silu", "gelu", "gelu_tanh",
    "clamped" (which has `alpha` and `limit`), or "relu2", the only one without a gate.
    """
    g, u = gate.to(tl.float32), up.to(tl.float32)
    if ACTIVATION == "relu2":
        g = tl.where(g < 0.0, 0.0, g)  # keeps NaN
        result = g * g
    elif ACTIVATION == "clamped":
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        result = (u + 1.0) * (g / (1.0 + tl.exp(g * -alpha)))
    else:
        if ACTIVATION == "silu":
            act = g / (1.0 + tl.exp(-g))
        elif ACTIVATION == "gelu":
            act = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
        else:  # 0.5 (1 + tanh(t)) = sigmoid(2 t)
            tl.static_assert(ACTIVATION == "gelu_tanh")
            act = g / (1.0 + tl.exp(-1.5957691216057308 * (g + 0.044715 * g * g * g)))
        result = act.to(gate.dtype).to(tl.float32) * u
    return result.to(gate.dtype)
