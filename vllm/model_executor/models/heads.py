"""From one row of queries, keys and values to what attention takes: norms, turning, cache rows.

Called by attention blocks (`blocks.py`, `gated_attention.py`). On CUDA it is one launch, which also
writes the cache; elsewhere the separate ops run, and the attention kernel writes it.

Shapes: T tokens, H and Hkv heads of this rank, D head size, X = (H + 2 Hkv) D.
"""

from __future__ import annotations

from torch import Tensor

from vllm._custom_ops.fused_qkv import qkv_norm_rope_cache
from vllm.attention.layer import Attention
from vllm.batch import AttentionState, ForwardBatch
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.parts import Product, ProductParts
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

PARTS_HEAD_SIZE = 128
"""Of heads that one launch adds up from parts and finishes."""


def attend_heads(
    layer: Attention,
    qkv_TX: Product,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    rope: RotaryEmbedding | None,
    batch: ForwardBatch,
    attention: AttentionState,
) -> Tensor:
    """Norm and turn the heads in place, cache keys and values, and attend.

    Args:
        layer: the attention of this layer.
        qkv_TX: query heads, key heads, value heads of each token; overwritten. In parts where
            `takes_parts` says so.
        q_norm: norm of query heads, or None.
        k_norm: norm of key heads, or None.
        rope: rotary embedding of both, or None.
        batch: the step.
        attention: caches of all layers and plans of all kernels.

    Returns:
        [T, H, D].
    """
    parts: ProductParts | None = None
    if isinstance(qkv_TX, ProductParts):
        parts, qkv_TX = qkv_TX, qkv_TX.new_empty()
    sizes = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    heads = qkv_TX.unflatten(-1, (-1, layer.head_size))
    q_THD, k_THD, v_THD = heads.split(sizes, dim=1)
    is_one_op = parts is not None or (qkv_TX.is_cuda and _caches_its_dtype(layer))
    if is_one_op:
        _finish_in_one_op(layer, qkv_TX, parts, q_norm, k_norm, rope, batch, attention)
    else:
        if q_norm is not None and k_norm is not None:
            q_norm.apply_in_place(q_THD)
            k_norm.apply_in_place(k_THD)
        if rope is not None:
            rope(batch.positions, q_THD, k_THD)
    return layer(q_THD, k_THD, v_THD, batch, attention, rows_are_cached=is_one_op)


def takes_parts(layer: Attention, rope: RotaryEmbedding | None) -> bool:
    """Whether heads that are still in parts are finished in one launch, see `layers/parts.py`."""
    is_turned_in_halves = rope is None or rope.is_neox
    return layer.head_size == PARTS_HEAD_SIZE and is_turned_in_halves and _caches_its_dtype(layer)


def _caches_its_dtype(layer: Attention) -> bool:
    return layer.query.kv_dtype == layer.query.dtype


def _finish_in_one_op(
    layer: Attention,
    qkv_TX: Tensor,
    parts: ProductParts | None,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    rope: RotaryEmbedding | None,
    batch: ForwardBatch,
    attention: AttentionState,
) -> None:
    cache = attention.caches[layer.layer]
    assert cache is not None, f"layer {layer.layer} has no cache bound to it"
    qkv_norm_rope_cache(
        qkv_TX,
        batch.positions,
        batch.groups[cache.group].slots,
        cache.tensors[0],
        cache.tensors[-1],
        None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight,
        0.0 if q_norm is None else q_norm.epsilon,
        None if rope is None else rope.cos_sin,
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_size,
        0 if rope is None else rope.spec.rotary_dim,
        rope is None or rope.is_neox,
        None if parts is None else parts.parts_PTN,
        None if parts is None else parts.bias_N,
    )
