"""The gated delta rule over prompts: chunks in parallel, then states from chunk to chunk.

Called by `delta_rule.py`. Within a chunk that begins with state S, with G the running sum of the
log-decays and keys of length one, the changes U of all its tokens solve a unit lower triangular
system. Its matrix without decays has an inverse with entries of at most the learning rates,
    T = (I + L)^-1,  L[i, j] = k[i]·k[j] beta[j]  (j < i),
and the decays multiply it entry by entry: with D[i, j] = exp(G[i] - G[j]),
    U = beta (T D) V - beta exp(G) (T K) S.
The first kernel finds both factors, and the decayed products of queries and keys, for every chunk
at once; the second walks over the chunks of a row with a slice of the state in registers and writes
the outputs, while the tiles of the next chunks are on their way. `delta_hopper.py` has another
second kernel.

Operands of products are rounded to the dtype of the inputs. What a token does to its own output is
the largest part of it where states decay fast, and is kept out of that: the diagonal of T D is one,
which no rounding changes, and the diagonal of queries and keys is applied in float32. A state that
a step continues may be far larger than what follows: queries of its first chunk read it in two
parts.

Source: Gated Delta Networks, arXiv 2412.06464, section 3.3; the form for one chunk is that of
arXiv 2406.06484. The inverse is that of `triangle.py`.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.delta_hopper import can_pass, run_pass
from vllm._custom_ops.triton.device import fit_stages
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.state_rows import (
    ROW_TABLES,
    count_places,
    find_row,
    load_row,
    load_tile,
)
from vllm._custom_ops.triton.tensor_cores import plain_products
from vllm._custom_ops.triton.triangle import invert
from vllm.utils.math import cdiv, next_power

_L2_EPSILON = tl.constexpr(1e-6)
MANY_PROGRAMS = 512  # where wider slices of the state still give every processor its share
PASS_STAGES = 3  # chunks whose tiles are in flight
_PART = 64  # columns of keys and values in a tile of the first kernel: one fits beside its product

_plain_launch = partial(fast_launch, compiled_in=plain_products)


@triton.jit
def _store_tile(x, value, tokens, at, is_token, is_at, stride):
    mask = is_token[:, None] & is_at[None, :]
    tl.store(x + tokens[:, None] * stride + at[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _sum_squares(x):
    """Return the sum of squares of each row."""
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, axis=1)


@_plain_launch
@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "num_places"],
    do_not_specialize_on_alignment=ROW_TABLES,
)
def _delta_chunk_kernel(
    by_state,
    by_value,
    attention,
    factors,
    kept,
    q,
    k,
    v,
    g,
    beta,
    cu_query_lens,
    scale,
    num_rows,
    num_tokens,
    num_places,
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
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
    VALUE_PART: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write for one chunk and head what does not need its state.

    by_state [T, H, K]: -beta exp(G) T K; by_value [T, H, V]: beta (T D) V;
    attention [T, H, CHUNK]: decayed products of queries and earlier keys; factors [3, H, T]: what
    queries and changes are multiplied with when they meet the state, and the products of queries
    with their own keys; kept [H, places]: the decay of the whole chunk.
    """
    place = tl.program_id(0)
    head = tl.program_id(1)
    row, chunk = find_row(place, cu_query_lens, num_rows, CHUNK)
    first = tl.load(cu_query_lens + row) + chunk * CHUNK
    end = tl.load(cu_query_lens + row + 1)
    if first >= end:
        return
    at = tl.arange(0, CHUNK)
    is_token = first + at < end
    tokens = (first + at).to(tl.int64)
    dtype = k.dtype.element_ty

    step = tl.load(g + tokens * HEADS + head, mask=is_token, other=0.0)
    decay, total = tl.cumsum(step, axis=0), tl.sum(step, axis=0)
    rate = tl.load(beta + tokens * HEADS + head, mask=is_token, other=0.0)
    keys = ()  # type: tuple[tl.tensor, ...]
    below = tl.zeros([CHUNK, CHUNK], tl.float32)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    key_factor = tl.zeros([CHUNK], tl.float32)
    query_factor = tl.zeros([CHUNK], tl.float32)
    for i in tl.static_range(PARTS):
        at_K = i * PART + tl.arange(0, PART)
        key = load_tile(k + head // SHARE * k_head, tokens, at_K, is_token, at_K < KEY, k_stride)
        query = load_tile(q + head // SHARE * q_head, tokens, at_K, is_token, at_K < KEY, q_stride)
        below = tl.dot(key, tl.trans(key), below, input_precision=PRECISION)
        scores = tl.dot(query, tl.trans(key), scores, input_precision=PRECISION)
        key_factor += _sum_squares(key)
        query_factor += _sum_squares(query)
        keys = keys + (key,)  # noqa: RUF005 - the compiler knows no stars
    if HAS_L2NORM:  # as factors of the products, so that operands are not rounded again
        key_factor = tl.rsqrt(key_factor + _L2_EPSILON)
        query_factor = tl.rsqrt(query_factor + _L2_EPSILON) * scale
    else:
        key_factor = tl.full([CHUNK], 1.0, tl.float32)
        query_factor = tl.full([CHUNK], 1.0, tl.float32) * scale

    is_before = at[:, None] > at[None, :]
    gaps = tl.where(at[:, None] >= at[None, :], decay[:, None] - decay[None, :], float("-inf"))
    gaps = tl.exp(gaps)
    scores *= gaps * key_factor[None, :] * query_factor[:, None]
    own = tl.sum(tl.where(at[:, None] == at[None, :], scores, 0.0), axis=1)
    scores = tl.where(is_before, scores, 0.0)
    attention += head * CHUNK
    _store_tile(attention, scores, tokens, at, is_token, at < CHUNK, HEADS * CHUNK)

    below *= key_factor[:, None] * (rate * key_factor)[None, :]
    inverse = invert(tl.where(is_before, below, 0.0), CHUNK, LEVELS, INNER, PRECISION)

    # With the keys as they are. Ratios of lengths keep the ones on the diagonal.
    mixed = inverse * key_factor[None, :] * (1.0 / key_factor)[:, None]
    mixed = mixed.to(dtype)
    rates = -(rate * tl.exp(decay) * key_factor)
    for i in tl.static_range(PARTS):
        made = tl.dot(mixed, keys[i], input_precision=PRECISION) * rates[:, None]
        at_K = i * PART + tl.arange(0, PART)
        _store_tile(by_state + head * KEY, made, tokens, at_K, is_token, at_K < KEY, HEADS * KEY)

    mixed = (inverse * gaps).to(dtype)
    by_value += head * VALUE
    for i in tl.static_range(VALUE_PARTS):
        at_V = i * VALUE_PART + tl.arange(0, VALUE_PART)
        value = load_tile(v + head * v_head, tokens, at_V, is_token, at_V < VALUE, v_stride)
        made = tl.dot(mixed, value, input_precision=PRECISION) * rate[:, None]
        _store_tile(by_value, made, tokens, at_V, is_token, at_V < VALUE, HEADS * VALUE)

    factors += head * num_tokens + tokens
    part = HEADS * num_tokens
    tl.store(factors, query_factor * tl.exp(decay), mask=is_token)
    tl.store(factors + part, key_factor * tl.exp(total - decay), mask=is_token)
    tl.store(factors + 2 * part, own, mask=is_token)
    tl.store(kept + head * num_places + place, tl.exp(total))


@_plain_launch
@triton.jit(
    do_not_specialize=["num_tokens", "num_places"], do_not_specialize_on_alignment=ROW_TABLES
)
def _delta_pass_kernel(
    out,
    by_state,
    by_value,
    attention,
    factors,
    kept,
    q,
    k,
    state,
    state_offsets,
    cu_query_lens,
    num_computed,
    num_tokens,
    num_places,
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
    STAGES: tl.constexpr,
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
    state_KV = tl.load(own, mask=in_state & (computed > 0), other=0.0).to(tl.float32)
    q += head // SHARE * q_head
    k += head // SHARE * k_head
    factors += head * num_tokens
    part = HEADS * num_tokens
    kept += head * num_places + begin // CHUNK - tl.load(cu_query_lens) // CHUNK + row
    exact_end = tl.where(computed > 0, begin + 1, begin)
    for first in tl.range(begin, end, CHUNK, num_stages=STAGES):
        is_token = first + at < end
        tokens = (first + at).to(tl.int64)
        old = state_KV.to(dtype)  # what follows is loaded where it is used: registers are few
        solved = load_tile(by_state + head * KEY, tokens, keys, is_token, is_key, HEADS * KEY)
        change = load_tile(
            by_value + head * VALUE, tokens, values, is_token, is_value, HEADS * VALUE
        )
        change = tl.dot(solved, old, change.to(tl.float32), input_precision=PRECISION)
        query = load_tile(q, tokens, keys, is_token, is_key, q_stride)
        read = tl.dot(query, old, input_precision=PRECISION)
        if first < exact_end:
            rest = (state_KV - old.to(tl.float32)).to(dtype)
            read = tl.dot(query, rest, read, input_precision=PRECISION)
        read *= tl.load(factors + tokens, mask=is_token, other=0.0)[:, None]
        read += change * tl.load(factors + 2 * part + tokens, mask=is_token, other=0.0)[:, None]
        scores = load_tile(
            attention + head * CHUNK, tokens, at, is_token, at < CHUNK, HEADS * CHUNK
        )
        read = tl.dot(scores, change.to(dtype), read, input_precision=PRECISION)
        _store_tile(out + head * out_head, read, tokens, values, is_token, is_value, out_stride)
        change *= tl.load(factors + part + tokens, mask=is_token, other=0.0)[:, None]
        state_KV *= tl.load(kept)
        key = load_tile(k, tokens, keys, is_token, is_key, k_stride)
        state_KV = tl.dot(tl.trans(key), change.to(dtype), state_KV, input_precision=PRECISION)
        kept += 1
    tl.store(own, state_KV.to(state.dtype.element_ty), mask=in_state)


def _choose_pass(
    most: int, block_k: int, num_states: int, chunk: int, device: torch.device, *, is_wide: bool
) -> dict[str, int]:
    """Return the columns of the state in a program of the second kernel, and how it is launched."""
    if is_wide:
        return {"BLOCK_V": min(most, 16), "STAGES": 1, "num_warps": 4}
    block_v = min(most, 32)
    if most >= 64 and block_k <= 128 and num_states * (most // 64) >= MANY_PROGRAMS:
        block_v = 64
    stages = 1
    if block_k <= 128:  # tiles wait in shared memory, with three factors of each token; keys do not
        tile_bytes = chunk * 2 * (2 * block_k + chunk + block_v) + 4 * (3 * chunk + 1)
        stages = fit_stages(PASS_STAGES, tile_bytes, chunk * 2 * block_k, device)
    return {"BLOCK_V": block_v, "STAGES": stages, "num_warps": 8 if most > 16 else 4}


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
    state_offsets, cu_query_lens, _ = rows
    num_tokens, num_heads, value_size = v.shape
    num_rows, key_size = state_offsets.shape[0], q.shape[2]
    # float32 operands take twice the memory, so half the tokens; tf32 would not be exact enough.
    is_wide = q.dtype == torch.float32
    chunk, levels, precision = (32, 5, "tf32x3") if is_wide else (64, 6, "tf32")
    block_k, block_v = (max(16, next_power(n)) for n in (key_size, value_size))
    part, value_part = min(block_k, _PART), min(block_v, _PART)
    sizes = {
        "HEADS": num_heads, "KEY": key_size, "VALUE": value_size,
        "SHARE": num_heads // q.shape[1], "CHUNK": chunk, "PRECISION": precision,
    }  # fmt: skip
    num_places = count_places(num_tokens, num_rows, chunk)
    by_state = q.new_empty(num_tokens, num_heads, key_size)
    by_value = q.new_empty(num_tokens, num_heads, value_size)
    attention = q.new_empty(num_tokens, num_heads, chunk)
    factors = torch.empty(3, num_heads, num_tokens, dtype=torch.float32, device=q.device)
    kept = torch.empty(num_heads, num_places, dtype=torch.float32, device=q.device)
    # Entries of the inverse for keys of length one are small, and float16 keeps more of them.
    inner = tl.float16 if l2norm and not is_wide else tl.float32
    made = (by_state, by_value, attention, factors, kept)
    _delta_chunk_kernel[num_places, num_heads](
        *made, q, k, v, *gates, cu_query_lens, scale, num_rows, num_tokens, num_places,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        HAS_L2NORM=l2norm, PARTS=cdiv(key_size, part), PART=part,
        VALUE_PARTS=cdiv(value_size, value_part), VALUE_PART=value_part,
        LEVELS=levels, INNER=inner,
        num_warps=4, num_stages=1, **sizes,
    )  # fmt: skip
    if can_pass(out_THV, q, k):
        run_pass(out_THV, made, q, k, state, rows)
        return
    num_states = num_rows * num_heads
    tile = _choose_pass(block_v, block_k, num_states, chunk, q.device, is_wide=is_wide)
    _delta_pass_kernel[cdiv(value_size, tile["BLOCK_V"]), num_heads, num_rows](
        out_THV, *made, q, k, state, *rows, num_tokens, num_places,
        *out_THV.stride()[:2], *q.stride()[:2], *k.stride()[:2],
        state.stride(0), state_offsets.stride(0),
        BLOCK_K=block_k, **tile, **sizes,
    )  # fmt: skip
