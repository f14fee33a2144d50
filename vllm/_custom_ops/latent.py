"""Doors of the ops between the projections of latent attention and its kernels; CUDA tensors only.

Called by `model_executor/layers/mla.py` and `latent_expansion.py`. Naive twins:
`_custom_ops/naive/latent.py`. The ops check their arguments; nothing here computes.
"""

from __future__ import annotations

from torch import Tensor

from vllm._custom_ops.library import C


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
    """Norm and turn the rows of latent attention, store them, and turn its queries.

    Args:
        row_TD: float32, float16 or bfloat16 [T, L + R], contiguous in D; the first L elements are
            normed, the last R turned, in place.
        query_THR: [T, H, R], the queries' part with positions; R is a power of two from 2 on.
        turned_THR: like `query_THR`, which it may be; overwritten with the turned queries.
        positions: int64 [T], rows of `cos_sin`.
        slots_T2: int32; as in `cache.reshape_and_cache`; offset -1 skips the token.
        cache: [num_units, block_tokens, 1, L + R] view, stride(0) = 256 bytes; the rows' dtype.
        weight: [L], as in `norm.rms_norm`, of the rows' dtype.
        epsilon: added to the mean square.
        cos_sin: float32 [max_pos, R], as in `rope.rotary_embedding`.
        is_neox: pairs are (i, i + R/2), else (2i, 2i + 1).

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.latent_norm_rope_cache(
        row_TD,
        query_THR,
        turned_THR,
        positions,
        slots_T2,
        cache,
        weight,
        epsilon,
        cos_sin,
        is_neox,
    )


def latent_keys(key_THD: Tensor, made_THX: Tensor, row_TD: Tensor, rope: int) -> None:
    """Write the keys of all heads: what was made from latents, then the part with positions.

    Args:
        key_THD: float32, float16 or bfloat16 [T, H, N + R], contiguous; overwritten.
        made_THX: [T, H, X], whose first N elements are a head's key without positions, N at most X.
        row_TD: [T, L + R], whose last R elements are the part that all heads share.
        rope: R.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.latent_keys(key_THD, made_THX, row_TD, rope)


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
    """Lay the rows of sequences behind each other, those of the cache before the new ones.

    Args:
        joined_SD: [sum of key lengths, L + R], contiguous; overwritten.
        row_TD: [T, L + R], the new rows.
        cache: as in `latent_norm_rope_cache`.
        block_offsets_BN: as in `attention.paged_attention`.
        cu_query_lens: int32 [B + 1].
        seq_lens: int32 [B].
        cu_key_lens: int32 [B + 1], how many of its last rows each sequence gives.
        max_key_len: no sequence gives more.
    """
    C.join_latents(
        joined_SD,
        row_TD,
        cache,
        block_offsets_BN,
        cu_query_lens,
        seq_lens,
        cu_key_lens,
        max_key_len,
    )
