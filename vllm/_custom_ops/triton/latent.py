"""Triton twins of `_custom_ops/latent.py`: one launch instead of four, one copy instead of two.

A token has two programs, one for its row, one for its queries, so that neither waits for the other.
Rounds where the separate ops do: after the norm, after its weight, after turning.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm._custom_ops.triton.attention_join import launch_join
from vllm._custom_ops.triton.launch import fast_launch
from vllm._custom_ops.triton.overlap import await_inputs, let_next_start, overlaps
from vllm.errors import ShapeError
from vllm.utils.math import cdiv, next_power

_KEYS_BLOCK = 16


@triton.jit
def _turn(x, cosine, sine, IS_NEOX: tl.constexpr):
    """Turn heads [H, R] by angles [R/2], float32 inside; float32."""
    HEADS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    if IS_NEOX:
        pairs = tl.permute(tl.reshape(x.to(tl.float32), (HEADS, 2, HALF)), (0, 2, 1))
    else:
        pairs = tl.reshape(x.to(tl.float32), (HEADS, HALF, 2))
    first, second = tl.split(pairs)
    cosine, sine = cosine[None, :], sine[None, :]
    turned = tl.join(first * cosine - second * sine, second * cosine + first * sine)
    if IS_NEOX:
        turned = tl.permute(turned, (0, 2, 1))
    return tl.reshape(turned, (HEADS, 2 * HALF))


@fast_launch
@triton.jit(do_not_specialize=["epsilon"])
def _latent_kernel(
    row,
    query,
    turned,
    positions,
    slots,
    cache,
    weight,
    cos_sin,
    epsilon,
    row_stride,
    query_token_stride,
    query_head_stride,
    turned_token_stride,
    turned_head_stride,
    unit_stride,
    token_stride,
    cos_sin_stride,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    IS_NEOX: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One (token, its queries or its row)."""
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, ROPE // 2)
    part = tl.arange(0, ROPE)
    await_inputs(OVERLAPS)
    let_next_start(OVERLAPS)
    angles = cos_sin + tl.load(positions + token) * cos_sin_stride
    cosine, sine = tl.load(angles + half), tl.load(angles + ROPE // 2 + half)
    if tl.program_id(1) == 0:
        head = tl.arange(0, BLOCK_H)
        is_head = (head < HEADS)[:, None]
        places = query + token * query_token_stride + head[:, None] * query_head_stride + part
        x = tl.load(places, mask=is_head, other=0.0)
        x = _turn(x, cosine, sine, IS_NEOX).to(turned.dtype.element_ty)
        places = turned + token * turned_token_stride + head[:, None] * turned_head_stride + part
        tl.debug_barrier()  # warps may share a pair: all have read before one overwrites
        tl.store(places, x, mask=is_head)
        return
    row += token * row_stride
    unit, inside = tl.load(slots + 2 * token), tl.load(slots + 2 * token + 1)
    element = tl.arange(0, BLOCK_L)
    is_in = element < LATENT
    raw = tl.load(row + element, mask=is_in, other=0.0)
    x = raw.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / LATENT + epsilon)
    gain = tl.load(weight + element, mask=is_in, other=0.0)
    normed = (x.to(raw.dtype).to(tl.float32) * gain.to(tl.float32)).to(raw.dtype)
    end = tl.load(row + LATENT + part)[None, :]
    end = _turn(end, cosine, sine, IS_NEOX).to(raw.dtype)
    tl.debug_barrier()
    tl.store(row + element, normed, mask=is_in)
    tl.store(row + LATENT + part[None, :], end)
    if unit >= 0:
        stored = cache + unit.to(tl.int64) * unit_stride + inside * token_stride
        tl.store(stored + element, normed, mask=is_in)
        tl.store(stored + LATENT + part[None, :], end)


def latent_norm_rope_cache(
    row_TD: Tensor,
    query_THR: Tensor,
    turned_THR: Tensor,
    positions: Tensor,
    slots_T2: Tensor,
    cache: Tensor,
    weight: Tensor,
    epsilon: float,
    cos_sin: Tensor,
    is_neox: bool,
) -> None:
    """See the door."""
    num_tokens, heads, rope = query_THR.shape
    latent = weight.shape[0]
    dtypes = {x.dtype for x in (row_TD, query_THR, turned_THR, cache, weight)}
    if len(dtypes) > 1:
        raise ShapeError(f"latent_norm_rope_cache: the tensors have dtypes {dtypes}")
    if rope < 2 or rope & (rope - 1) or cos_sin.shape[1] != rope:
        raise ShapeError(f"latent_norm_rope_cache: R is {rope}, cos_sin {tuple(cos_sin.shape)}")
    if row_TD.shape != (num_tokens, latent + rope) or cache.shape[2:] != (1, latent + rope):
        raise ShapeError(
            f"latent_norm_rope_cache: rows have shape {tuple(row_TD.shape)}, the cache "
            f"{tuple(cache.shape)}; L is {latent}, R {rope}"
        )
    if num_tokens == 0:
        return
    is_overlapping = overlaps(row_TD.device)
    _latent_kernel[(num_tokens, 2)](
        row_TD,
        query_THR,
        turned_THR,
        positions,
        slots_T2,
        cache,
        weight,
        cos_sin,
        epsilon,
        row_TD.stride(0),
        *query_THR.stride()[:2],
        *turned_THR.stride()[:2],
        *cache.stride()[:2],
        cos_sin.stride(0),
        HEADS=heads,
        LATENT=latent,
        ROPE=rope,
        BLOCK_H=next_power(heads),
        BLOCK_L=next_power(latent),
        IS_NEOX=is_neox,
        OVERLAPS=is_overlapping,
        launch_pdl=is_overlapping,
        num_warps=4,
    )


@fast_launch
@triton.jit(do_not_specialize=["num_pairs"])
def _keys_kernel(
    key,
    made,
    row,
    num_pairs,
    made_token_stride,
    made_head_stride,
    row_stride,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """BLOCK pairs of token and head."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token, head = pair // HEADS, pair % HEADS
    is_pair = (pair < num_pairs)[:, None]
    target = key + pair[:, None] * (NOPE + ROPE)
    element = tl.arange(0, BLOCK_N)[None, :]
    places = made + (token * made_token_stride + head * made_head_stride)[:, None] + element
    is_in = is_pair & (element < NOPE)
    tl.store(target + element, tl.load(places, mask=is_in), mask=is_in)
    element = tl.arange(0, BLOCK_R)[None, :]
    places = row + (token * row_stride)[:, None] + LATENT + element
    is_in = is_pair & (element < ROPE)
    tl.store(target + NOPE + element, tl.load(places, mask=is_in), mask=is_in)


def latent_keys(key_THD: Tensor, made_THX: Tensor, row_TD: Tensor, rope: int) -> None:
    """See the door."""
    num_tokens, heads, size = key_THD.shape
    if not key_THD.is_contiguous() or made_THX.stride(2) != 1 or row_TD.stride(1) != 1:
        raise ShapeError("latent_keys: keys must be contiguous, what they are made of in its rows")
    if (
        made_THX.shape[:2] != (num_tokens, heads)
        or made_THX.shape[2] < size - rope
        or row_TD.shape[0] != num_tokens
        or not key_THD.dtype == made_THX.dtype == row_TD.dtype
    ):
        raise ShapeError(
            f"latent_keys: keys have shape {tuple(key_THD.shape)}, what they are made of "
            f"{tuple(made_THX.shape)} and {tuple(row_TD.shape)}"
        )
    if num_tokens == 0:
        return
    num_pairs = num_tokens * heads
    _keys_kernel[(cdiv(num_pairs, _KEYS_BLOCK),)](
        key_THD,
        made_THX,
        row_TD,
        num_pairs,
        *made_THX.stride()[:2],
        row_TD.stride(0),
        HEADS=heads,
        LATENT=row_TD.shape[1] - rope,
        NOPE=size - rope,
        ROPE=rope,
        BLOCK=_KEYS_BLOCK,
        BLOCK_N=next_power(size - rope),
        BLOCK_R=next_power(rope),
        num_warps=4,
    )


def join_latents(
    joined_SD: Tensor,
    row_TD: Tensor,
    cache: Tensor,
    block_offsets_BN: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    cu_key_lens: Tensor,
    max_key_len: int,
) -> None:
    """See the door."""
    if seq_lens.shape[0] == 0 or max_key_len == 0:
        return
    launch_join(
        (joined_SD, joined_SD, cache, cache, row_TD, row_TD),
        (block_offsets_BN, cu_query_lens, seq_lens, cu_key_lens),
        max_key_len=max_key_len,
        first_row=0,
        num_rows=seq_lens.shape[0],
        has_fresh=True,
        has_one_field=True,
    )


OPS = {
    "latent_norm_rope_cache": latent_norm_rope_cache,
    "latent_keys": latent_keys,
    "join_latents": join_latents,
}
SCHEMAS = {
    "latent_norm_rope_cache": (
        "latent_norm_rope_cache(Tensor(a!) row, Tensor query, Tensor(b!) turned, Tensor positions, "
        "Tensor slots, Tensor(c!) cache, Tensor weight, float epsilon, Tensor cos_sin, "
        "bool is_neox) -> ()"
    ),
    "join_latents": (
        "join_latents(Tensor(a!) joined, Tensor row, Tensor cache, Tensor block_offsets, "
        "Tensor cu_query_lens, Tensor seq_lens, Tensor cu_key_lens, int max_key_len) -> ()"
    ),
    "latent_keys": "latent_keys(Tensor(a!) key, Tensor made, Tensor row, int rope) -> ()",
}
