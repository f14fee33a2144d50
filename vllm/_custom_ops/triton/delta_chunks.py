"""The gated delta rule over prompts: chunks in parallel, then states from chunk to chunk.

Called by `delta_rule.py`. Within a chunk that begins with state S, with G the running sum of the
log-decays, the changes U of all its tokens solve a unit lower triangular system,
    (I + A) U = beta (V - exp(G) K S),   A[i, j] = beta[i] exp(G[i] - G[j]) k[i]·k[j]  (j < i),
so with T = (I + A)^-1 they are U = T beta V - (T beta exp(G) K) S. The first kernel finds both
factors, and the decayed and masked products of queries and keys, for every chunk at once; the
second walks over the chunks of a row with a slice of the state in registers and writes the outputs.

Source: Gated Delta Networks, arXiv 2412.06464, section 3.3; the form for one chunk is that of
arXiv 2406.06484. The inverse is by block elimination, see `_invert`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.state_rows import count_places, find_row, load_row, load_tile
from vllm._custom_ops.triton.tensor_cores import plain_products

_L2_EPSILON = tl.constexpr(1e-6)
MANY_PROGRAMS = 512  # where wider slices of the state still give every processor its share


@triton.jit
def _invert(below, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of I + below, where `below` is strictly lower triangular.

    Diagonal blocks of twice the size are inverted from those of one size by
        [[P, 0], [R, Q]]^-1 = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]],
    all blocks of a level in one product. Unlike powers of `below` this does not cancel when keys
    resemble each other.
    """
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, below, 0.0)
    for level in range(1, LEVELS):
        is_corner = ((row >> (level + 1)) == (column >> (level + 1))) & (
            (row >> level) != (column >> level)
        )
        corner = tl.dot(inverse, tl.where(is_corner, below, 0.0), input_precision=PRECISION)
        inverse -= tl.dot(corner, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _store_tile(x, value, tokens, at, is_token, is_at, stride):
    mask = is_token[:, None] & is_at[None, :]
    tl.store(x + tokens[:, None] * stride + at[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _inverse_length(x):
    """Return 1 / sqrt(sum of squares + epsilon) of each row."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) + _L2_EPSILON)


@fast_launch
@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _delta_chunk_kernel(
    by_state,
    by_value,
    attention,
    factors,
    q,
    k,
    v,
    g,
    beta,
    cu_query_lens,
    scale,
    num_rows,
    num_tokens,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHARE: tl.constexpr,
    HAS_L2NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write for one chunk and head what does not need its state.

    by_state [T, H, K]: T beta exp(G) K; by_value [T, H, V]: T beta V; attention [T, H, CHUNK]:
    decayed products of queries and keys; factors [3, H, T]: G, and what queries and keys are
    multiplied with when they meet the state.
    """
    head = tl.program_id(1)
    row, chunk = find_row(tl.program_id(0), cu_query_lens, num_rows, CHUNK)
    first = tl.load(cu_query_lens + row) + chunk * CHUNK
    end = tl.load(cu_query_lens + row + 1)
    if first >= end:
        return
    at = tl.arange(0, CHUNK)
    is_token = first + at < end
    tokens = (first + at).to(tl.int64)
    keys, values = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    is_key, is_value = keys < KEY, values < VALUE
    dtype = k.dtype.element_ty

    decay = tl.cumsum(tl.load(g + tokens * HEADS + head, mask=is_token, other=0.0), axis=0)
    rate = tl.load(beta + tokens * HEADS + head, mask=is_token, other=0.0)
    key = load_tile(k + head // SHARE * k_head, tokens, keys, is_token, is_key, k_stride)
    query = load_tile(q + head // SHARE * q_head, tokens, keys, is_token, is_key, q_stride)
    key_factor = tl.full([CHUNK], 1.0, tl.float32)
    query_factor = tl.full([CHUNK], 1.0, tl.float32) * scale
    if HAS_L2NORM:  # as factors of the products, so that operands are not rounded again
        key_factor = _inverse_length(key)
        query_factor = _inverse_length(query) * scale

    is_seen = at[:, None] >= at[None, :]
    weight = tl.exp(tl.where(is_seen, decay[:, None] - decay[None, :], float("-inf")))
    weight *= key_factor[None, :]
    products = tl.dot(key, tl.trans(key), input_precision=PRECISION) * weight
    products *= (rate * key_factor)[:, None]
    below = tl.where(at[:, None] > at[None, :], products, 0.0)
    inverse = _invert(below, CHUNK, LEVELS, PRECISION)

    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * weight
    scores = tl.where(is_seen, scores * query_factor[:, None], 0.0)
    attention += head * CHUNK
    _store_tile(attention, scores, tokens, at, is_token, at < CHUNK, HEADS * CHUNK)

    value = load_tile(v + head * v_head, tokens, values, is_token, is_value, v_stride)
    made = tl.dot((inverse * rate[None, :]).to(dtype), value, input_precision=PRECISION)
    _store_tile(by_value + head * VALUE, made, tokens, values, is_token, is_value, HEADS * VALUE)
    inverse *= (rate * tl.exp(decay) * key_factor)[None, :]
    made = tl.dot(inverse.to(dtype), key, input_precision=PRECISION)
    _store_tile(by_state + head * KEY, made, tokens, keys, is_token, is_key, HEADS * KEY)

    place = factors + head * num_tokens + tokens
    step = HEADS * num_tokens
    tl.store(place, decay, mask=is_token)
    tl.store(place + step, query_factor * tl.exp(decay), mask=is_token)
    tl.store(place + 2 * step, key_factor, mask=is_token)


@fast_launch
@triton.jit(do_not_specialize=["num_tokens"])
def _delta_pass_kernel(
    out,
    by_state,
    by_value,
    attention,
    factors,
    q,
    k,
    state,
    state_offsets,
    cu_query_lens,
    num_computed,
    num_tokens,
    out_stride,
    out_head,
    q_stride,
    q_head,
    k_stride,
    k_head,
    unit_stride,
    offset_stride,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take BLOCK_V columns of one head's state through all chunks of a row."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    begin, end, computed = load_row(row, cu_query_lens, num_computed, False)
    if (begin >= end) | (computed < 0):
        return
    at = tl.arange(0, CHUNK)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = keys < KEY, values < VALUE
    dtype = k.dtype.element_ty

    unit = tl.load(state_offsets + row * offset_stride).to(tl.int64)
    own = state + unit * unit_stride + head * (KEY * VALUE)
    own = own + keys[:, None] * VALUE + values[None, :]
    in_state = is_key[:, None] & is_value[None, :]
    state_KV = tl.load(own, mask=in_state & (computed > 0), other=0.0)
    q += head // SHARE * q_head
    k += head // SHARE * k_head
    factors += head * num_tokens
    step = HEADS * num_tokens
    for first in range(begin, end, CHUNK):
        is_token = first + at < end
        tokens = (first + at).to(tl.int64)
        solved = load_tile(by_state + head * KEY, tokens, keys, is_token, is_key, HEADS * KEY)
        change = load_tile(
            by_value + head * VALUE, tokens, values, is_token, is_value, HEADS * VALUE
        )
        query = load_tile(q, tokens, keys, is_token, is_key, q_stride)
        key = load_tile(k, tokens, keys, is_token, is_key, k_stride)
        scores = load_tile(
            attention + head * CHUNK, tokens, at, is_token, at < CHUNK, HEADS * CHUNK
        )
        decay = tl.load(factors + tokens, mask=is_token, other=0.0)
        query_factor = tl.load(factors + step + tokens, mask=is_token, other=0.0)
        key_factor = tl.load(factors + 2 * step + tokens, mask=is_token, other=0.0)
        total = tl.load(factors + tl.minimum(first + CHUNK, end) - 1)

        old = state_KV.to(dtype)
        change = change.to(tl.float32) - tl.dot(solved, old, input_precision=PRECISION)
        read = tl.dot(query, old, input_precision=PRECISION) * query_factor[:, None]
        read += tl.dot(scores, change.to(dtype), input_precision=PRECISION)
        _store_tile(out + head * out_head, read, tokens, values, is_token, is_value, out_stride)
        key_factor *= tl.exp(tl.where(is_token, total - decay, 0.0))
        change = (change * key_factor[:, None]).to(dtype)
        state_KV *= tl.exp(total)
        state_KV += tl.dot(tl.trans(key), change, input_precision=PRECISION)
    tl.store(own, state_KV, mask=in_state)


def _choose_value_block(most: int, q: Tensor, num_heads: int) -> int:
    """Return how many columns of the state a program keeps; wide ones load keys less often."""
    if q.dtype == torch.float32:
        return 16
    if most >= 64 and q.shape[2] <= 128 and num_heads * (most // 64) >= MANY_PROGRAMS:
        return 64
    return min(most, 32)


@plain_products()
def run_delta_chunks(
    out_THV: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    state: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    scale: float,
    *,
    l2norm: bool,
) -> None:
    """Run the rule over rows of any lengths.

    Args:
        qkv: as in the door.
        gates: logarithms of the decay and learning rates, float32 [T, H], contiguous.
        rows: offsets of the states, cu_query_lens, num_computed.

    Cost: scratch of K + V + 64 numbers a token and head; six products of 64 x 64 x K a chunk.
    """
    q, k, v = qkv
    state_offsets, cu_query_lens, num_computed = rows
    num_tokens, num_heads, value_size = v.shape
    num_rows, key_size = state_offsets.shape[0], q.shape[2]
    # float32 operands take twice the memory, so half the tokens; tf32 would not be exact enough.
    chunk, levels, precision = (32, 5, "tf32x3") if q.dtype == torch.float32 else (64, 6, "tf32")
    block_k, block_v = (max(16, triton.next_power_of_2(n)) for n in (key_size, value_size))
    sizes = {
        "HEADS": num_heads, "KEY": key_size, "VALUE": value_size,
        "SHARE": num_heads // q.shape[1], "BLOCK_K": block_k, "CHUNK": chunk,
        "PRECISION": precision,
    }  # fmt: skip
    by_state = q.new_empty(num_tokens, num_heads, key_size)
    by_value = q.new_empty(num_tokens, num_heads, value_size)
    attention = q.new_empty(num_tokens, num_heads, chunk)
    factors = torch.empty(3, num_heads, num_tokens, dtype=torch.float32, device=q.device)
    _delta_chunk_kernel[count_places(num_tokens, num_rows, chunk), num_heads](
        by_state, by_value, attention, factors, q, k, v, *gates, cu_query_lens, scale, num_rows,
        num_tokens, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        HAS_L2NORM=l2norm, BLOCK_V=block_v, LEVELS=levels, num_warps=4 if chunk == 64 else 8,
        num_stages=1, **sizes,
    )  # fmt: skip
    block_v = _choose_value_block(block_v, q, num_rows * num_heads)
    _delta_pass_kernel[triton.cdiv(value_size, block_v), num_heads, num_rows](
        out_THV, by_state, by_value, attention, factors, q, k, state, state_offsets,
        cu_query_lens, num_computed, num_tokens,
        *out_THV.stride()[:2], *q.stride()[:2], *k.stride()[:2],
        state.stride(0), state_offsets.stride(0),
        BLOCK_V=block_v, num_warps=8 if block_v == 64 else 4,
        num_stages=1, **sizes,
    )  # fmt: skip
