"""The Mamba-2 scan over prompts: chunks whose states pass from one to the next.

Called by `mamba2.py` for what `mamba2_hopper.py` does not serve. With G the running sum of dt A in
a chunk that begins with state S,
    out[i] = exp(G[i]) S C[i] + sum over j <= i of exp(G[i] - G[j]) (C[i]·B[j]) dt[j] x[j] + D x[i].
Three kernels: G of all chunks; a walk over the chunks of a row with the state of a head in
registers, which keeps the state that each chunk begins with; then the outputs of all chunks at
once, where a program makes the products of B and C for several heads of a group. Powers are of 2,
and dt[j] is part of the exponent: exp(G[i] - G[j]) dt[j] is 2 to the decay[i] - source[j].

Source: Transformers are SSMs, arXiv 2405.21060, section 6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.state_rows import (
    ROW_TABLES,
    count_places,
    find_row,
    load_row,
    load_tile,
    softplus,
)
from vllm._custom_ops.triton.tensor_cores import plain_products
from vllm.utils.math import cdiv, next_power

_plain_launch = partial(fast_launch, compiled_in=plain_products)

CHUNK = 64  # tokens whose operands have 16 bits
_FLOAT_CHUNK = 32  # those of float32
SCRATCH_BYTES = 512 << 20
MANY_PROGRAMS = 256  # that give every processor its share
STATE_STAGES, OUTPUT_STAGES = 3, 2  # tiles in flight
STATE_WARPS = 4
OUTPUT_REGISTERS = 168  # of a thread: with a few more, two programs share a processor, not three
_BLOCK_H = 16  # heads whose decays a program makes
_LOG2_E = tl.constexpr(1.4426950408889634)
_MAX_POWER = tl.constexpr(126.0)  # 2 to it is finite


@triton.jit
def compute_dt(dt, dt_bias, head, dt_min, dt_max, HAS_BIAS: tl.constexpr):
    """Return the time step in float32, from its projection."""
    dt = dt.to(tl.float32)
    if HAS_BIAS:
        dt += tl.load(dt_bias + head)
    return limit_dt(dt, dt_min, dt_max)


@triton.jit
def limit_dt(dt, dt_min, dt_max):
    """Return the time step from its projection with bias."""
    return tl.minimum(tl.maximum(softplus(dt), dt_min), dt_max)


@_plain_launch
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=ROW_TABLES)
def _mamba_decays_kernel(
    decays,
    dt,
    a,
    dt_bias,
    cu_query_lens,
    num_rows,
    dt_min,
    dt_max,
    dt_stride,
    HEADS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write decay G and source G - log dt of a chunk and BLOCK_H heads: [places, H, 2, CHUNK].

    Behind a row's last token the decay stays and the source is infinite: nothing comes from there.
    """
    place = tl.program_id(0)
    row, chunk = find_row(place, cu_query_lens, num_rows, CHUNK)
    first = tl.load(cu_query_lens + row) + chunk * CHUNK
    end = tl.load(cu_query_lens + row + 1)
    if first >= end:
        return
    at = tl.arange(0, CHUNK)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_token, is_head = first + at < end, heads < HEADS
    tokens = (first + at).to(tl.int64)
    step = load_tile(dt, tokens, heads, is_token, is_head, dt_stride).to(tl.float32)
    if HAS_BIAS:
        step += tl.load(dt_bias + heads, mask=is_head, other=0.0)[None, :]
    step = limit_dt(step, dt_min, dt_max)
    rate = tl.load(a + heads, mask=is_head, other=0.0) * _LOG2_E
    decay = tl.cumsum(tl.where(is_token[:, None], step * rate[None, :], 0.0), axis=0)
    source = tl.where(is_token[:, None], decay - tl.log2(step), float("inf"))
    kept = decays + place.to(tl.int64) * (HEADS * 2 * CHUNK)
    kept = kept + heads[None, :] * (2 * CHUNK) + at[:, None]
    tl.store(kept, decay, mask=is_head[None, :])
    tl.store(kept + CHUNK, source, mask=is_head[None, :])


@_plain_launch
@triton.jit(do_not_specialize_on_alignment=ROW_TABLES)
def _mamba_states_kernel(
    states,
    decays,
    x,
    b,
    state,
    state_offsets,
    cu_query_lens,
    num_computed,
    x_stride,
    x_head,
    b_stride,
    b_group,
    unit_stride,
    offset_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    STATE: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take BLOCK_P rows of one head's state through a row and keep what each chunk begins with.

    That is kept in the dtype of products: [places, H, P, N].
    """
    head = tl.program_id(1)
    row = tl.program_id(2)
    begin, end, computed = load_row(row, cu_query_lens, num_computed, False)
    if (begin >= end) | (computed < 0):
        return
    at = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    numbers, chunk_at = tl.arange(0, BLOCK_N), tl.arange(0, CHUNK)
    is_at, is_number = at < SIZE, numbers < STATE
    in_state = is_at[:, None] & is_number[None, :]
    inside = at[:, None] * STATE + numbers[None, :]
    unit = tl.load(state_offsets + row * offset_stride).to(tl.int64)
    own = state + unit * unit_stride + head * (SIZE * STATE)
    state_PN = tl.load(own + inside, mask=in_state & (computed > 0), other=0.0).to(tl.float32)

    place = (begin // CHUNK - tl.load(cu_query_lens) // CHUNK + row).to(tl.int64)
    decays += (place * HEADS + head) * (2 * CHUNK)
    states += (place * HEADS + head) * (SIZE * STATE)
    x += begin.to(tl.int64) * x_stride + head * x_head
    b += begin.to(tl.int64) * b_stride + (head // SHARE) * b_group
    dtype = x.dtype.element_ty
    for left in range(end - begin, 0, -CHUNK):
        tl.store(states + inside, state_PN.to(states.dtype.element_ty), mask=in_state)
        is_token = chunk_at < left
        value_PT = x + chunk_at[None, :] * x_stride + at[:, None]
        value_PT = tl.load(value_PT, mask=is_token[None, :] & is_at[:, None], other=0.0)
        key = load_tile(b, chunk_at, numbers, is_token, is_number, b_stride)
        total = tl.load(decays + CHUNK - 1)
        weight = tl.exp2(total - tl.load(decays + CHUNK + chunk_at))
        value_PT = (value_PT.to(tl.float32) * weight[None, :]).to(dtype)
        state_PN *= tl.exp2(total)
        state_PN = tl.dot(value_PT, key, state_PN, input_precision=PRECISION)
        x += CHUNK * x_stride
        b += CHUNK * b_stride
        decays += HEADS * 2 * CHUNK
        states += HEADS * SIZE * STATE
    tl.store(own + inside, state_PN.to(state.dtype.element_ty), mask=in_state)


@_plain_launch
@triton.jit(do_not_specialize=["num_rows", "heads_each"], do_not_specialize_on_alignment=ROW_TABLES)
def _mamba_outputs_kernel(
    out,
    states,
    decays,
    x,
    b,
    c,
    skip,
    cu_query_lens,
    num_computed,
    num_rows,
    heads_each,
    out_stride,
    out_head,
    x_stride,
    x_head,
    b_stride,
    b_group,
    c_stride,
    c_group,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    STATE: tl.constexpr,
    SHARE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the outputs of one chunk for `heads_each` heads of a group, BLOCK_P columns of each."""
    place = tl.program_id(0)
    row, chunk = find_row(place, cu_query_lens, num_rows, CHUNK)
    begin, end, computed = load_row(row, cu_query_lens, num_computed, False)
    first = begin + chunk * CHUNK
    if (first >= end) | (computed < 0):
        return
    head = tl.program_id(1) * heads_each
    group = head // SHARE
    chunk_at, numbers = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    at = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_token, is_number, is_at = chunk_at < end - first, numbers < STATE, at < SIZE
    start = first.to(tl.int64)
    key = load_tile(
        b + start * b_stride + group * b_group, chunk_at, numbers, is_token, is_number, b_stride
    )
    query = load_tile(
        c + start * c_stride + group * c_group, chunk_at, numbers, is_token, is_number, c_stride
    )
    products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    # What comes later has no product, so that its weight may be anything finite.
    products = tl.where(chunk_at[:, None] >= chunk_at[None, :], products, 0.0)

    dtype = x.dtype.element_ty
    in_value = is_token[:, None] & is_at[None, :]
    in_state = is_number[:, None] & is_at[None, :]
    values = x + start * x_stride + head * x_head + chunk_at[:, None] * x_stride + at[None, :]
    results = out + start * out_stride + head * out_head
    results = results + chunk_at[:, None] * out_stride + at[None, :]
    kept = states + (place.to(tl.int64) * HEADS + head) * (SIZE * STATE)
    kept = kept + at[None, :] * STATE + numbers[:, None]
    decays += (place.to(tl.int64) * HEADS + head) * (2 * CHUNK)
    for index in range(0, heads_each):
        before = tl.load(kept, mask=in_state, other=0.0)
        value = tl.load(values, mask=in_value, other=0.0)
        decay = tl.load(decays + chunk_at)
        source = tl.load(decays + CHUNK + chunk_at)
        read = tl.dot(query, before, input_precision=PRECISION)
        read *= tl.exp2(decay)[:, None]
        weight = tl.exp2(tl.minimum(decay[:, None] - source[None, :], _MAX_POWER))
        read = tl.dot((products * weight).to(dtype), value, read, input_precision=PRECISION)
        if HAS_SKIP:
            read += tl.load(skip + head + index) * value.to(tl.float32)
        tl.store(results, read.to(out.dtype.element_ty), mask=in_value)
        kept += SIZE * STATE
        values += x_head
        results += out_head
        decays += 2 * CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What both ways of running take; `lens` are tokens before the step, for a step op after it."""

    out: Tensor
    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    skip: Tensor | None
    dt_bias: Tensor | None
    state: Tensor
    state_offsets: Tensor
    cu_query_lens: Tensor
    lens: Tensor
    dt_min: float
    dt_max: float

    def strides(self) -> tuple[int, ...]:
        """Return the strides in the order of the kernels."""
        tensors = (self.b, self.c)
        shared = tuple(s for t in tensors for s in t.stride()[:2])
        own = (*self.out.stride()[:2], *self.x.stride()[:2], self.dt.stride(0))
        return (*own, *shared, self.state.stride(0), self.state_offsets.stride(0))

    def sizes(self) -> dict[str, int | bool]:
        """Return the constants of the kernels."""
        return {
            "SIZE": self.x.shape[2],
            "STATE": self.b.shape[2],
            "SHARE": self.x.shape[1] // self.b.shape[1],
            "HAS_SKIP": self.skip is not None,
            "HAS_BIAS": self.dt_bias is not None,
        }


def make_decays(scan: Scan, chunk: int) -> Tensor:
    """Return decays and sources of all chunks and heads, see the kernel: [places, H, 2, chunk]."""
    num_tokens, num_heads, _ = scan.x.shape
    num_rows = scan.state_offsets.shape[0]
    num_places = count_places(num_tokens, num_rows, chunk)
    shape = (num_places, num_heads, 2, chunk)
    decays = torch.empty(shape, dtype=torch.float32, device=scan.x.device)
    _mamba_decays_kernel[num_places, cdiv(num_heads, _BLOCK_H)](
        decays, scan.dt, scan.a, scan.dt_bias, scan.cu_query_lens, num_rows, scan.dt_min,
        scan.dt_max, scan.dt.stride(0), HEADS=num_heads, HAS_BIAS=scan.dt_bias is not None,
        BLOCK_H=_BLOCK_H, CHUNK=chunk,
    )  # fmt: skip
    return decays


def run_mamba_chunks(scan: Scan) -> None:
    """Run the scan over rows of any lengths.

    Scratch is a state a chunk in the dtype of x. Since every row ends a chunk, many short rows want
    much of it: they are taken in parts, each with at most half more than the tokens alone want, or
    SCRATCH_BYTES.
    """
    num_tokens, num_heads, head_size = scan.x.shape
    num_rows = scan.state_offsets.shape[0]
    # float32 operands take twice the memory, so half the tokens; tf32 would not be exact enough.
    chunk = _FLOAT_CHUNK if scan.x.dtype == torch.float32 else CHUNK
    place_bytes = num_heads * head_size * scan.b.shape[2] * scan.x.element_size()
    least = count_places(num_tokens, 0, chunk)
    rows_each = max(1, least // 2, SCRATCH_BYTES // place_bytes - least)
    if num_rows <= rows_each:
        _run_rows(scan, chunk)
        return
    for first in range(0, num_rows, rows_each):
        rows = slice(first, min(first + rows_each, num_rows))
        part = replace(
            scan,
            state_offsets=scan.state_offsets[rows],
            cu_query_lens=scan.cu_query_lens[first : rows.stop + 1],
            lens=scan.lens[rows],
        )
        _run_rows(part, chunk)


def _run_rows(scan: Scan, chunk: int) -> None:
    num_tokens, num_heads, head_size = scan.x.shape
    state_size = scan.b.shape[2]
    num_rows = scan.state_offsets.shape[0]
    num_places = count_places(num_tokens, num_rows, chunk)
    is_float = chunk == _FLOAT_CHUNK
    decays = make_decays(scan, chunk)
    shape = (num_places, num_heads, head_size, state_size)
    states = torch.empty(shape, dtype=scan.x.dtype, device=scan.x.device)
    x_strides, b_strides = scan.x.stride()[:2], scan.b.stride()[:2]
    shared = {
        "HEADS": num_heads, "SIZE": head_size, "STATE": state_size, "CHUNK": chunk,
        "SHARE": num_heads // scan.b.shape[1], "PRECISION": "tf32x3" if is_float else "tf32",
        "BLOCK_N": max(16, next_power(state_size)),
    }  # fmt: skip
    is_wide = num_rows * num_heads * head_size // 64 >= MANY_PROGRAMS and state_size <= 128
    block_p = _fit_columns(head_size, 16 if is_float else 64 if is_wide else 32)
    _mamba_states_kernel[cdiv(head_size, block_p), num_heads, num_rows](
        states, decays, scan.x, scan.b, scan.state, scan.state_offsets, scan.cu_query_lens,
        scan.lens, *x_strides, *b_strides, scan.state.stride(0), scan.state_offsets.stride(0),
        BLOCK_P=block_p, num_warps=STATE_WARPS,
        num_stages=1 if is_float else STATE_STAGES, **shared,
    )  # fmt: skip
    block_p = _fit_columns(head_size, 16 if is_float else 64)
    blocks = cdiv(head_size, block_p)
    heads_each = _share_heads(num_heads // scan.b.shape[1], num_places * num_heads * blocks)
    _mamba_outputs_kernel[num_places, num_heads // heads_each, blocks](
        scan.out, states, decays, scan.x, scan.b, scan.c, scan.skip, scan.cu_query_lens,
        scan.lens, num_rows, heads_each, *scan.out.stride()[:2], *x_strides, *b_strides,
        *scan.c.stride()[:2], HAS_SKIP=scan.skip is not None, BLOCK_P=block_p,
        num_warps=max(4, chunk // 16), num_stages=1 if is_float else OUTPUT_STAGES,
        maxnreg=OUTPUT_REGISTERS if state_size <= 128 else None, **shared,
    )  # fmt: skip


def _fit_columns(size: int, limit: int) -> int:
    """Return how many columns of a head a program takes: at most `limit`, with least waste."""
    most = min(limit, max(16, next_power(size)))
    return min((most, max(16, most // 2)), key=lambda n: -(-size // n) * n)


def _share_heads(share: int, num_programs: int) -> int:
    """Return how many of `share` heads a program takes, so that enough programs are left."""
    for count in (8, 4, 2):
        if share % count == 0 and num_programs // count >= MANY_PROGRAMS * 2:
            return count
    return 1
