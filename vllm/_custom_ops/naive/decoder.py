"""The fused decoder layers as a composition of single ops: the twin of `_custom_ops/decoder.py`.

Read by tests and by anyone who wants to know what the op means. Never called by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm._custom_ops.naive import activation, attention, cache, linear, norm, rope

if TYPE_CHECKING:
    from vllm._custom_ops.decoder import DecoderLayer, DecoderStack, PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFamilies:
    """Modules of single ops: the twins, or the doors in a test of bits."""

    activation: ModuleType = activation
    attention: ModuleType = attention
    cache: ModuleType = cache
    linear: ModuleType = linear
    norm: ModuleType = norm
    rope: ModuleType = rope


def decoder_layers(
    hidden_TE: Tensor,
    stack: DecoderStack,
    positions_T: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    block_offsets: Sequence[Tensor],
    slots: Sequence[Tensor],
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    cache_groups: Sequence[int],
    rope_tables: Sequence[Tensor],
) -> None:
    """Run the layers one op after the other, rounding after each."""
    compose_decoder_layers(
        OpFamilies(),
        hidden_TE,
        stack,
        positions_T,
        (cu_query_lens, seq_lens),
        [(block_offsets[group], slots[group]) for group in cache_groups],
        list(zip(key_caches, value_caches, strict=True)),
        rope_tables,
    )


def compose_decoder_layers(
    ops: OpFamilies,
    hidden_TE: Tensor,
    stack: DecoderStack,
    positions_T: Tensor,
    lens: tuple[Tensor, Tensor],
    places: Sequence[tuple[Tensor, Tensor]],
    caches: Sequence[tuple[Tensor, Tensor]],
    rope_tables: Sequence[Tensor],
) -> None:
    """Run the layers with the given families of single ops.

    Args:
        ops: the ops.
        hidden_TE: embeddings in, result out.
        stack: the layers.
        positions_T: int64 [T].
        lens: cu_query_lens and seq_lens.
        places: block offsets and slots of each layer.
        caches: K and V views of each layer.
        rope_tables: as in `decoder_layers`.
    """
    for layer, place, views in zip(stack.layers, places, caches, strict=True):
        x_TE = _normed(ops, hidden_TE, layer.input_norm, stack.epsilon)
        qkv = _multiplied(
            ops, x_TE, layer.qkv, (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_size
        )
        heads_TD = _attended(
            ops, layer, qkv, positions_T, stack.epsilon, lens, place, views, rope_tables
        )
        x_TE = _multiplied(ops, heads_TD, layer.out, stack.hidden_size)
        hidden_TE += _normed(ops, x_TE, layer.post_attention_norm, stack.epsilon)
        x_TE = _normed(ops, hidden_TE, layer.mlp_norm, stack.epsilon)
        gate_up = _multiplied(ops, x_TE, layer.gate_up, 2 * layer.intermediate_size)
        x_TI = gate_up.new_empty(gate_up.shape[0], layer.intermediate_size)
        getattr(ops.activation, f"{layer.activation}_and_mul")(x_TI, gate_up)
        x_TE = _multiplied(ops, x_TI, layer.down, stack.hidden_size)
        hidden_TE += _normed(ops, x_TE, layer.post_mlp_norm, stack.epsilon)
    hidden_TE.copy_(_normed(ops, hidden_TE, stack.final_norm, stack.epsilon))


def _normed(ops: OpFamilies, x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    if weight is None:
        return x
    out = torch.empty_like(x)
    ops.norm.rms_norm(out, x, weight, epsilon)
    return out


def _multiplied(ops: OpFamilies, x_TK: Tensor, weight: PackedLinear, n: int) -> Tensor:
    out_TN = x_TK.new_empty(x_TK.shape[0], n)
    ops.linear.linear(out_TN, x_TK, weight.packed, weight.bias)
    return out_TN


def _attended(
    ops: OpFamilies,
    layer: DecoderLayer,
    qkv: Tensor,
    positions_T: Tensor,
    epsilon: float,
    lens: tuple[Tensor, Tensor],
    place: tuple[Tensor, Tensor],
    views: tuple[Tensor, Tensor],
    rope_tables: Sequence[Tensor],
) -> Tensor:
    """Return the heads' outputs [T, H * D]; the cache gets the new rows."""
    sizes = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    query, key, value = qkv.unflatten(1, (-1, layer.head_size)).split(sizes, 1)
    for heads, weight in ((query, layer.q_norm), (key, layer.k_norm)):
        if weight is not None:
            ops.norm.rms_norm(heads, heads, weight, epsilon)
    if layer.rope_table is not None:
        table = rope_tables[layer.rope_table]
        ops.rope.rotary_embedding(positions_T, query, key, layer.head_size, table, layer.is_neox)
    offsets, slots = place
    ops.cache.reshape_and_cache(key, value, *views, slots)
    out_THD = torch.empty_like(query, memory_format=torch.contiguous_format)
    ops.attention.paged_attention(
        out_THD,
        query,
        *views,
        offsets,
        *lens,
        layer.scale,
        window=layer.window,
        soft_cap=layer.soft_cap,
        sinks=layer.sinks,
        sink_tokens=layer.sink_tokens,
        chunk_tokens=layer.chunk_tokens,
        fresh_key_THD=key,
        fresh_value_THD=value,
    )
    return out_THD.flatten(1)
