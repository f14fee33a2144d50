"""What happens to Q, K and V before the attention: the twin of `_custom_ops/fused_qkv.py`.

Read by tests and by anyone who wants to know what the op means. Never called by the engine.
"""

from __future__ import annotations

from torch import Tensor

from vllm._custom_ops.naive.cache import reshape_and_cache
from vllm._custom_ops.naive.linear import sum_parts
from vllm._custom_ops.naive.norm import rms_norm
from vllm._custom_ops.naive.rope import rotary_embedding


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
    """The sum of parts; norms of query and key heads; rotary embedding; the cache write."""
    if parts_PTX is not None:
        total_TX = sum_parts(parts_PTX)
        qkv_TX.copy_(total_TX if bias_X is None else total_TX + bias_X.float())
    heads = qkv_TX.unflatten(-1, (-1, head_size))
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    for x, weight in ((query, q_norm), (key, k_norm)):
        if weight is not None:
            rms_norm(x, x, weight, epsilon)
    if cos_sin is not None:
        assert cos_sin.shape[1] == rotary_dim
        rotary_embedding(positions, query, key, head_size, cos_sin, is_neox)
    reshape_and_cache(key, value, key_cache, value_cache, slots_T2)
