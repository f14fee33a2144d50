"""Door of the fused decoder layers: a run of dense layers in one op and one parallel region.

Called by `model_executor/models/fused_run.py`, which lowers layers to it. Naive twin:
`_custom_ops/naive/decoder.py`. The compiled op checks its arguments; nothing here computes. Every
result equals, bit for bit, what the single ops would give one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vllm._custom_ops.library import C

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLinear:
    """A packed weight [n, k] and its bias.

    Attributes:
        packed: from `linear.pack_linear_weight`.
        bias: [n] of the weight's dtype, or None.
    """

    packed: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderLayer:
    """One dense decoder layer: norm, attention, norm, gated MLP around a residual stream.

    Attributes:
        input_norm, mlp_norm: [hidden_size]; all norms of a stack have one dtype, the weights' or
            float32 (`norm.rms_norm` says what that means).
        post_attention_norm, post_mlp_norm: norms of what is added to the stream, or None.
        q_norm, k_norm: [head_size] norms of each head before it turns, or None.
        qkv: query heads, then key heads, then value heads.
        gate_up: gate rows, then up rows.
        activation: one of ACTIVATIONS.
        rope_table: index into the tables of a step; None for a layer without positions.
        rotary_dim: elements of a head that turn, columns of its table.
        is_neox: whether halves turn against each other, else neighbours.
        window, chunk_tokens, sink_tokens, soft_cap, sinks: as in `attention.paged_attention`.
    """

    input_norm: Tensor
    mlp_norm: Tensor
    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    activation: str
    scale: float
    post_attention_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    rope_table: int | None = None
    rotary_dim: int = 0
    is_neox: bool = True
    window: int = 0
    chunk_tokens: int = 0
    sink_tokens: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None


class DecoderStack:
    """Layers made ready for `decoder_layers`, with the norm that follows the last one.

    Args:
        hidden_size: elements of the residual stream.
        epsilon: of all norms.
        final_norm: norm of the whole stack's result, or None: then the stream itself is returned.

    Attributes:
        handle: what the compiled op takes; it holds the weights too.

    Raises:
        ShapeError: a weight has the wrong shape, stride or dtype.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        *,
        hidden_size: int,
        epsilon: float,
        final_norm: Tensor | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.hidden_size = hidden_size
        self.epsilon = epsilon
        self.final_norm = final_norm
        weights: list[Tensor] = []
        ints: list[int] = []
        floats: list[float] = []
        for layer in self.layers:
            for tensor in _list_weights(layer):
                ints.append(-1 if tensor is None else len(weights))
                if tensor is not None:
                    weights.append(tensor)
            ints += _list_ints(layer)
            floats += (layer.scale, layer.soft_cap)
        self.handle: Tensor = C.make_decoder_stack(
            weights, ints, floats, hidden_size, epsilon, final_norm
        )


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
    """Run all layers of a stack over the tokens of a step.

    Args:
        hidden_TE: float32 or bfloat16 [T, E], contiguous in E; embeddings in, result out.
        stack: the layers.
        positions_T: int64 [T].
        cu_query_lens: int32 [B + 1].
        seq_lens: int32 [B].
        block_offsets: for each cache group, int32 [B, max_blocks] as in `paged_attention`.
        slots: for each cache group, int32 [T, 2] as in `reshape_and_cache`.
        key_caches: for each layer, its view of the arena, as in `paged_attention`.
        value_caches: same.
        cache_groups: for each layer, the cache group that it belongs to.
        rope_tables: float32 [positions, rotary_dim]; a row is the cosines, then the sines.

    Raises:
        ShapeError: an argument has the wrong shape, stride, dtype or value.

    Cost: reads every weight once for each 192 tokens.
    """
    C.decoder_layers(
        hidden_TE,
        stack.handle,
        positions_T,
        cu_query_lens,
        seq_lens,
        block_offsets,
        slots,
        key_caches,
        value_caches,
        cache_groups,
        rope_tables,
    )


def _list_weights(layer: DecoderLayer) -> tuple[Tensor | None, ...]:
    """Return the weights in the order of LayerInt in csrc/cpu/decoder.cpp."""
    return (
        layer.input_norm,
        layer.post_attention_norm,
        layer.mlp_norm,
        layer.post_mlp_norm,
        layer.q_norm,
        layer.k_norm,
        layer.qkv.packed,
        layer.qkv.bias,
        layer.out.packed,
        layer.out.bias,
        layer.gate_up.packed,
        layer.gate_up.bias,
        layer.down.packed,
        layer.down.bias,
        layer.sinks,
    )


def _list_ints(layer: DecoderLayer) -> tuple[int, ...]:
    """Return the numbers that follow the weights, in the same order."""
    return (
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_size,
        layer.intermediate_size,
        -1 if layer.rope_table is None else layer.rope_table,
        layer.rotary_dim,
        int(layer.is_neox),
        ACTIVATIONS.index(layer.activation),
        layer.window,
        layer.chunk_tokens,
        layer.sink_tokens,
    )
