"""The Mamba-2 scan over prompts: chunks whose states pass from one to the next.

Called by `mamba2.py`. With G the running sum of dt A in a chunk that begins with state S,
    out[i] = exp(G[i]) S C[i] + sum over j <= i of exp(G[i] - G[j]) (C[i]·B[j]) dt[j] x[j] + D x[i].
The products of B and C are made for all chunks at once, since heads of a group share them; then
programs walk over the chunks of a row with the state of a head in registers.

Source: Transformers are SSMs, arXiv 2405.21060, section 6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.state_rows import count_places, find_row, load_row, load_tile, softplus
from vllm._custom_ops.triton.tensor_cores import plain_products

MANY_PROGRAMS = 256  # where whole heads give every processor its share


@triton.jit
def compute_dt(dt, dt_bias, head, dt_min, dt_max, HAS_BIAS: tl.constexpr):
    """Return the time step in float32, from its projection."""
    dt = dt.to(tl.float32)
    if HAS_BIAS:
        dt += tl.load(dt_bias + head)
    return tl.minimum(tl.maximum(softplus(dt), dt_min), dt_max)


@triton.jit(do_not_specialize=["num_rows"])
def _mamba_products_kernel(
    products,
    b,
    c,
    cu_query_lens,
    num_rows,
    b_stride,
    b_group,
    c_stride,
    c_group,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write C[i]·B[j] of the tokens of one chunk and group, float32 [T, G, CHUNK]."""
    group = tl.program_id(1)
    row, chunk = find_row(tl.program_id(0), cu_query_lens, num_rows, CHUNK)
    first = tl.load(cu_query_lens + row) + chunk * CHUNK
    end = tl.load(cu_query_lens + row + 1)
    if first >= end:
        return
    at, numbers = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    is_token, is_number = first + at < end, numbers < STATE
    tokens = (first + at).to(tl.int64)
    key = load_tile(b + group * b_group, tokens, numbers, is_token, is_number, b_stride)
    query = load_tile(c + group * c_group, tokens, numbers, is_token, is_number, c_stride)
    made = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    place = products + group * CHUNK + tokens[:, None] * (GROUPS * CHUNK) + at[None, :]
    tl.store(place, made, mask=is_token[:, None])


@triton.jit
def _mamba_pass_kernel(
    out,
    products,
    x,
    dt,
    a,
    b,
    c,
    skip,
    dt_bias,
    state,
    state_offsets,
    cu_query_lens,
    num_computed,
    dt_min,
    dt_max,
    out_stride,
    out_head,
    x_stride,
    x_head,
    dt_stride,
    b_stride,
    b_group,
    c_stride,
    c_group,
    unit_stride,
    offset_stride,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    STATE: tl.constexpr,
    SHARE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take BLOCK_P rows of one head's state through all chunks of a row."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    begin, end, computed = load_row(row, cu_query_lens, num_computed, False)
    if (begin >= end) | (computed < 0):
        return
    chunk_at, numbers = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    at = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_at, is_number = at < SIZE, numbers < STATE
    dtype = x.dtype.element_ty

    unit = tl.load(state_offsets + row * offset_stride).to(tl.int64)
    own = state + unit * unit_stride + head * (SIZE * STATE)
    own = own + at[None, :] * STATE + numbers[:, None]
    in_state = is_at[None, :] & is_number[:, None]
    state_NP = tl.load(own, mask=in_state & (computed > 0), other=0.0)
    rate = tl.load(a + head)
    group = head // SHARE
    out += head * out_head
    x += head * x_head
    b += group * b_group
    c += group * c_group
    products += group * CHUNK
    for first in range(begin, end, CHUNK):
        is_token = first + chunk_at < end
        tokens = (first + chunk_at).to(tl.int64)
        value = load_tile(x, tokens, at, is_token, is_at, x_stride)
        key = load_tile(b, tokens, numbers, is_token, is_number, b_stride)
        query = load_tile(c, tokens, numbers, is_token, is_number, c_stride)
        scores = load_tile(products, tokens, chunk_at, is_token, chunk_at < CHUNK, GROUPS * CHUNK)
        step = tl.load(dt + tokens * dt_stride + head, mask=is_token, other=0.0)
        step = compute_dt(step, dt_bias, head, dt_min, dt_max, HAS_BIAS)
        step = tl.where(is_token, step, 0.0)
        decay = tl.cumsum(step * rate, axis=0)
        total = tl.sum(step * rate, axis=0)

        is_seen = chunk_at[:, None] >= chunk_at[None, :]
        weight = tl.exp(tl.where(is_seen, decay[:, None] - decay[None, :], float("-inf")))
        scores = tl.where(is_seen, scores * weight * step[None, :], 0.0).to(dtype)
        read = tl.dot(query, state_NP.to(dtype), input_precision=PRECISION)
        read *= tl.exp(decay)[:, None]
        read += tl.dot(scores, value, input_precision=PRECISION)
        if HAS_SKIP:
            read += tl.load(skip + head) * value.to(tl.float32)
        place = out + tokens[:, None] * out_stride + at[None, :]
        tl.store(place, read.to(out.dtype.element_ty), mask=is_token[:, None] & is_at[None, :])
        made = value.to(tl.float32) * (step * tl.exp(total - decay))[:, None]
        state_NP *= tl.exp(total)
        state_NP += tl.dot(tl.trans(key), made.to(dtype), input_precision=PRECISION)
    tl.store(own, state_NP, mask=in_state)


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


@plain_products()
def run_mamba_chunks(scan: Scan) -> None:
    """Run the scan over rows of any lengths; scratch of one CHUNK of float32 a token and group."""
    num_tokens, num_heads, head_size = scan.x.shape
    num_groups, state_size = scan.b.shape[1:]
    num_rows = scan.state_offsets.shape[0]
    # float32 operands take twice the memory, so half the tokens; tf32 would not be exact enough.
    chunk, precision = (32, "tf32x3") if scan.x.dtype == torch.float32 else (64, "tf32")
    block_n, block_p = (max(16, triton.next_power_of_2(n)) for n in (state_size, head_size))
    is_wide = num_rows * num_heads * head_size // 64 >= MANY_PROGRAMS and state_size <= 128
    block_p = min(block_p, 16 if chunk == 32 else 64 if is_wide else 32)
    shape = (num_tokens, num_groups, chunk)
    products = torch.empty(shape, dtype=torch.float32, device=scan.x.device)
    shared = {"GROUPS": num_groups, "BLOCK_N": block_n, "CHUNK": chunk, "PRECISION": precision}
    _mamba_products_kernel[count_places(num_tokens, num_rows, chunk), num_groups](
        products, scan.b, scan.c, scan.cu_query_lens, num_rows,
        *scan.b.stride()[:2], *scan.c.stride()[:2], STATE=state_size, num_warps=4, num_stages=1,
        **shared,
    )  # fmt: skip
    _mamba_pass_kernel[triton.cdiv(head_size, block_p), num_heads, num_rows](
        scan.out, products, scan.x, scan.dt, scan.a, scan.b, scan.c, scan.skip, scan.dt_bias,
        scan.state, scan.state_offsets, scan.cu_query_lens, scan.lens, scan.dt_min, scan.dt_max,
        *scan.strides(), BLOCK_P=block_p, num_warps=4 if block_p == 16 else 8,
        num_stages=1,
        **shared, **scan.sizes(),
    )  # fmt: skip
