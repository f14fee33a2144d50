"""Door of the op between the projection to Q, K and V and the attention; CUDA tensors only.

Called by `model_executor/models/heads.py`. Naive twin: `_custom_ops/naive/fused_qkv.py`. The
compiled op checks its arguments; nothing here computes. Equal bit for bit to the separate ops on
the same device: `norm.rms_norm`, `rope.rotary_embedding`, `cache.reshape_and_cache`.
"""

from __future__ import annotations

from torch import Tensor

from vllm._custom_ops.library import C


def qkv_norm_rope_cache(
    qkv_TX: Tensor,
    positions: Tensor,
    slots_T2: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    epsilon: float,
    cos_sin: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    rotary_dim: int,
    is_neox: bool,
    parts_PTX: Tensor | None = None,
    bias_X: Tensor | None = None,
) -> None:
    """Norm and turn query and key heads in place, and write key and value rows to the cache.

    Given the parts of a product, it adds them up first: then `qkv_TX` is written only.

    Args:
        qkv_TX: float32, bfloat16 or float16 [T, (num_heads + 2 * num_kv_heads) * head_size]: query
            heads, key heads, value heads; contiguous in X. Value heads stay as they are, if there
            are no parts.
        positions: int64 [T], rows of `cos_sin`.
        slots_T2: int32; as in `cache.reshape_and_cache`; offset -1 skips the token.
        key_cache: [num_units, block_tokens, num_kv_heads, head_size], dtype of `qkv_TX`,
            stride(0) = 256 bytes.
        value_cache: same.
        q_norm: weight [head_size] of the query heads' RMS norm, as in `norm.rms_norm`; None is no
            norm.
        k_norm: same of the key heads, of the same dtype.
        epsilon: of both norms.
        cos_sin: float32 [max_pos, rotary_dim], as in `rope.rotary_embedding`; None where
            `rotary_dim` is 0.
        num_heads: query heads of this rank.
        num_kv_heads: key heads of this rank, and as many value heads.
        head_size: elements of one head.
        rotary_dim: first elements of a head that turn; 0 is none.
        is_neox: pairs are (i, i + rotary_dim/2), else (2i, 2i + 1).
        parts_PTX: float32 [P, T, X], contiguous, as `linear.skinny_linear_parts` leaves them; their
            sum in their order, with the bias, is rounded to the dtype of `qkv_TX`. One launch where
            P <= 9 and heads are 128 elements of 16 bits that turn in halves, if at all, both norms
            or none; else two.
        bias_X: of the dtype of `qkv_TX`, added to the sum of parts, or None.

    Raises:
        ShapeError: an argument has the wrong shape, stride, dtype or device.
    """
    C.qkv_norm_rope_cache(
        qkv_TX,
        positions,
        slots_T2,
        key_cache,
        value_cache,
        q_norm,
        k_norm,
        epsilon,
        cos_sin,
        num_heads,
        num_kv_heads,
        head_size,
        rotary_dim,
        is_neox,
        parts_PTX,
        bias_X,
    )
