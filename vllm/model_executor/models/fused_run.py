"""Runs of dense decoder blocks as one compiled op.

`causal_lm.py` asks for the stages of a model once its kernels are bound: a block stays as it is, or
consecutive blocks become a `FusedRun`, with the same results bit for bit. Only what the op of
`_custom_ops/decoder.py` can do is lowered: dense layers of one rank, attention by the kernel `cpu`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vllm._custom_ops.decoder import DecoderLayer, DecoderStack, PackedLinear, decoder_layers
from vllm.batch import AttentionState, ForwardBatch, LayerCache
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.blocks import AttentionBlock, DecoderBlock, MlpBlock
from vllm.model_executor.models.delta import Delta

FUSED_KERNEL = "cpu"


class FusedRun:
    """Consecutive decoder blocks, called as a block is.

    Args:
        blocks: dense, packed, all of one model.

    Attributes:
        layers: indices of its decoder layers.
    """

    def __init__(self, blocks: Sequence[DecoderBlock]) -> None:
        parts = [_attention_of(block) for block in blocks]
        self.layers = tuple(part.attention.layer for part in parts)
        ropes = [part.rope for part in parts]
        self._ropes: list[RotaryEmbedding] = []
        for rope in ropes:
            if rope is not None and rope not in self._ropes:
                self._ropes.append(rope)
        norm = blocks[0].input_norm
        assert norm is not None
        self._stack = DecoderStack(
            [lower_block(block, self._ropes) for block in blocks],
            hidden_size=norm.weight.shape[0],
            epsilon=norm.epsilon,
        )
        self._bound: tuple[LayerCache | None, ...] = ()
        self._views: tuple[list[Tensor], list[Tensor], list[int]] = ([], [], [])

    def __call__(
        self,
        delta: Delta | None,
        residual_TE: Tensor,
        batch: ForwardBatch,
        attention: AttentionState,
    ) -> tuple[Delta | None, Tensor]:
        """Run the layers; see DecoderBlock.forward. Nothing is left to be added."""
        if delta is not None:
            residual_TE += delta.finish()
        key_caches, value_caches, groups = self._bind(attention.caches)
        decoder_layers(
            residual_TE,
            self._stack,
            batch.positions,
            batch.cu_query_lens,
            batch.seq_lens,
            [group.block_offsets for group in batch.groups],
            [group.slots for group in batch.groups],
            key_caches,
            value_caches,
            groups,
            [rope.cos_sin for rope in self._ropes],
        )
        return None, residual_TE

    def _bind(
        self, caches: tuple[LayerCache | None, ...]
    ) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """Return the cache views and groups; an engine's caches are the same in every step."""
        if caches is not self._bound:
            own = [caches[layer] for layer in self.layers]
            held = [cache for cache in own if cache is not None]
            assert len(held) == len(own), "every layer of a fused run keeps keys and values"
            self._views = (
                [cache.tensors[0] for cache in held],
                [cache.tensors[1] for cache in held],
                [cache.group for cache in held],
            )
            self._bound = caches
        return self._views


Stage = DecoderBlock | FusedRun


def make_stages(blocks: Sequence[DecoderBlock]) -> tuple[Stage, ...]:
    """Return the blocks, those that can be lowered joined to runs as long as possible."""
    stages: list[Stage] = []
    run: list[DecoderBlock] = []
    for block in blocks:
        if can_lower(block):
            run.append(block)
            continue
        if run:
            stages.append(FusedRun(run))
            run = []
        stages.append(block)
    if run:
        stages.append(FusedRun(run))
    return tuple(stages)


def can_lower(block: DecoderBlock) -> bool:
    """Whether the op can run a block: dense, packed, one rank, attention by the kernel `cpu`."""
    attention = block.attention
    return (
        isinstance(attention, AttentionBlock)
        and isinstance(block.mlp, MlpBlock)
        and _is_plain(attention)
        and _is_plain(block.mlp)
        and block.residual_scale == 1.0
        and attention.out.is_whole
        and attention.qkv.packed is not None
        and attention.attention.kernel == FUSED_KERNEL
        and attention.attention.spec.reads_from is None
    )


def _is_plain(part: AttentionBlock | MlpBlock) -> bool:
    """Whether a part is what the op computes; a family's own kind computes something else."""
    return type(part) in (AttentionBlock, MlpBlock)


def lower_block(block: DecoderBlock, ropes: Sequence[RotaryEmbedding]) -> DecoderLayer:
    """Return a block's weights and constants in the op's form.

    Args:
        block: one that `can_lower`.
        ropes: the rotary tables of the run.
    """
    assert isinstance(block.mlp, MlpBlock)
    assert block.input_norm is not None and block.mlp_norm is not None
    heads, mlp = _attention_of(block), block.mlp
    params = heads.attention.params
    return DecoderLayer(
        input_norm=block.input_norm.weight.data,
        post_attention_norm=_weight_of(block.post_attention_norm),
        mlp_norm=block.mlp_norm.weight.data,
        post_mlp_norm=_weight_of(block.post_mlp_norm),
        q_norm=_weight_of(heads.q_norm),
        k_norm=_weight_of(heads.k_norm),
        qkv=_packed_of(heads.qkv),
        out=_packed_of(heads.out),
        gate_up=_packed_of(mlp.gate_up),
        down=_packed_of(mlp.down),
        num_heads=heads.qkv.num_heads,
        num_kv_heads=heads.qkv.num_kv_heads,
        head_size=heads.head_size,
        intermediate_size=mlp.down.input_size,
        activation=mlp.activation_name,
        scale=params.scale,
        rope_table=None if heads.rope is None else ropes.index(heads.rope),
        rotary_dim=0 if heads.rope is None else heads.rope.spec.rotary_dim,
        is_neox=heads.rope is None or heads.rope.is_neox,
        window=params.window,
        chunk_tokens=params.chunk_tokens,
        sink_tokens=params.sink_tokens,
        soft_cap=params.soft_cap,
        sinks=params.sinks,
    )


def _attention_of(block: DecoderBlock) -> AttentionBlock:
    assert isinstance(block.attention, AttentionBlock)
    return block.attention


def _weight_of(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight.data


def _packed_of(linear: Linear) -> PackedLinear:
    assert linear.packed is not None
    return PackedLinear(
        packed=linear.packed, bias=None if linear.bias is None else linear.bias.data
    )
