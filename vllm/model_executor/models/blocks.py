"""The building blocks of decoder-only models, made from shapes.

`causal_lm.py` builds one `DecoderBlock` for each `LayerShape`. Blocks compute with what the batch
and the attention state give them and keep nothing between steps.

Shapes: T tokens, E hidden size, H and Hkv heads of this rank, D head size.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor, nn

from vllm._custom_ops.activation import add_gated
from vllm._custom_ops.moe import ExpertChoice
from vllm.attention.layer import Attention
from vllm.batch import AttentionState, ForwardBatch
from vllm.cache_spec import Full, LayerCacheSpec, Nothing
from vllm.model_executor.layers.activation import make_gated_activation
from vllm.model_executor.layers.fused_moe import FusedMoE, is_built_on_gpu
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.parts import Product
from vllm.model_executor.layers.shared_experts import append_gate, hold_shared, run_with_choice
from vllm.model_executor.layers.weight_place import PackedModule
from vllm.model_executor.models.block_context import BlockContext
from vllm.model_executor.models.delta import Delta, add_and_norm
from vllm.model_executor.models.heads import attend_heads, takes_parts
from vllm.model_executor.models.shapes import (
    AttentionShape,
    LayerShape,
    MlpShape,
    MoeShape,
    PartShape,
)
from vllm.utils.tensors import from_torch_dtype


class Mixer(Protocol):
    """What a decoder layer has in the place of attention.

    Attributes:
        spec: what the layer keeps.
        kernel_layer: the attention whose kernel the worker chooses, or None.
    """

    @property
    def spec(self) -> LayerCacheSpec: ...

    @property
    def kernel_layer(self) -> Attention | None: ...

    def __call__(
        self,
        x_TE: Tensor,
        batch: ForwardBatch,
        attention: AttentionState,
        tokens_L: Tensor | None = None,
    ) -> Product:
        """Return the contribution to the residual stream, [T, E].

        Args:
            x_TE: normed hidden states of the step's tokens.
            batch: the step.
            attention: what attention layers need beside it.
            tokens_L: int64 [L], the tokens whose contribution is wanted, which is then [L, E]; None
                is all. What the layer remembers is that of all tokens in any case.
        """
        ...


class AttentionBlock(nn.Module):
    """Projections, head norms, rotary embedding and attention of one layer."""

    def __init__(self, layer: int, shape: AttentionShape, context: BlockContext) -> None:
        super().__init__()
        size = shape.head_size
        self.head_size = size
        self.qkv = QKVParallelLinear(
            context.hidden_size,
            size,
            shape.num_heads,
            shape.num_kv_heads,
            bias=shape.qkv_bias,
            dtype=context.dtype,
            tp=context.tp,
        )
        self.out = RowParallelLinear(
            shape.num_heads * size,
            context.hidden_size,
            bias=shape.out_bias,
            dtype=context.dtype,
            tp=context.tp,
            leaves_parts=context.takes_parts,
        )
        self.q_norm = context.make_norm(size) if shape.has_qk_norm else None
        self.k_norm = context.make_norm(size) if shape.has_qk_norm else None
        self.rope = None if shape.rope is None else context.ropes.get(size, shape.rope)
        self.attention = Attention(
            layer,
            self.qkv.num_heads,
            self.qkv.num_kv_heads,
            size,
            shape.scale,
            Full(),
            dtype=from_torch_dtype(context.dtype),
            cache_dtype=context.cache_dtype,
            window=shape.window,
            soft_cap=shape.soft_cap,
            kind=shape.kind,
        )
        self._takes_parts = takes_parts(self.attention, self.rope)

    @property
    def spec(self) -> LayerCacheSpec:
        """See Mixer."""
        return self.attention.spec

    @property
    def kernel_layer(self) -> Attention:
        """See Mixer."""
        return self.attention

    def forward(
        self,
        x_TE: Tensor,
        batch: ForwardBatch,
        attention: AttentionState,
        tokens_L: Tensor | None = None,
    ) -> Product:
        """Return what the attention gives to the residual stream; see Mixer."""
        qkv_TX = self.qkv.multiply_to_parts(x_TE) if self._takes_parts else self.qkv(x_TE)
        out_THD = attend_heads(
            self.attention, qkv_TX, self.q_norm, self.k_norm, self.rope, batch, attention
        )
        return self.out.contribute(out_THD.flatten(1), tokens_L)


class MlpBlock(nn.Module):
    """A gated MLP.

    Args:
        is_partial: leave the sum over the ranks to the caller.
    """

    def __init__(self, shape: MlpShape, context: BlockContext, *, is_partial: bool = False) -> None:
        super().__init__()
        size = shape.intermediate_size
        self.gate_up = MergedColumnParallelLinear(
            context.hidden_size,
            {"gate": size, "up": size},
            bias=shape.bias,
            dtype=context.dtype,
            tp=context.tp,
            what="intermediate_size",
        )
        self.activation_name = shape.activation
        self.activation = make_gated_activation(shape.activation)
        self.down = RowParallelLinear(
            size,
            context.hidden_size,
            bias=shape.bias,
            dtype=context.dtype,
            tp=context.tp,
            what="intermediate_size",
            is_partial=is_partial,
            leaves_parts=context.takes_parts and not is_partial,
        )

    def forward(self, x_TE: Tensor) -> Product:
        """Return the MLP's contribution to the residual stream, [T, E]."""
        inner_TI = self.gate_up.multiply_gated(x_TE, self.activation, self.activation_name)
        return self.down.contribute(inner_TI)


class MoeBlock(PackedModule):
    """A router, its experts and, in some families, one expert that every token takes."""

    def __init__(self, shape: MoeShape, context: BlockContext) -> None:
        super().__init__()
        self._tp = context.tp
        self._shape = shape
        self._is_on_gpu = is_built_on_gpu()
        self.router = ReplicatedLinear(
            context.hidden_size, shape.num_experts, bias=False, dtype=context.dtype
        )
        self.experts = FusedMoE(
            shape.num_experts,
            shape.num_chosen,
            context.hidden_size,
            shape.intermediate_size,
            activation=shape.activation,
            renormalize=shape.renormalize,
            dtype=context.dtype,
            tp=context.tp,
            shared_size=shape.shared_size,
        )
        self.shared: MlpBlock | None = None
        self.shared_gate: ReplicatedLinear | None = None
        if shape.shared_size:
            mlp = MlpShape(intermediate_size=shape.shared_size, activation=shape.activation)
            self.shared = MlpBlock(mlp, context, is_partial=True)
        if shape.shared_size and shape.has_shared_gate:
            self.shared_gate = ReplicatedLinear(
                context.hidden_size, 1, bias=False, dtype=context.dtype
            )

    def pack(self) -> None:
        """On a GPU make the gate an output of the router, and see FusedMoE.hold_shared."""
        if self.shared_gate is not None and self._is_on_gpu:
            append_gate(self.router, self.shared_gate, self.experts.num_shared)
            self.shared_gate = None
        if self.shared is not None and self.experts.num_shared:
            hold_shared(self.experts, self.shared.gate_up, self.shared.down)
            self.shared = None

    def forward(self, x_TE: Tensor) -> Tensor:
        """Return the contribution of the chosen and the shared experts, [T, E]."""
        logits_TN, count = self.router(x_TE), self._shape.num_experts
        if self.experts.num_shared:
            choice = ExpertChoice(
                num_experts=count,
                num_shared=self.experts.num_shared,
                has_shared_gate=self._shape.has_shared_gate,
                renormalize=self._shape.renormalize,
            )
            out_TE = run_with_choice(self.experts, x_TE, logits_TN, choice)
            return self._tp.all_reduce(out_TE)
        out_TE = self.experts(x_TE, logits_TN[:, :count])
        if self.shared is not None:
            shared_TE = self.shared(x_TE)
            if logits_TN.shape[1] > count:  # the gate's is among them
                add_gated(out_TE, shared_TE, logits_TN[:, count : count + 1])
                return self._tp.all_reduce(out_TE)
            if self.shared_gate is not None:
                # torch.sigmoid rounds an element by its place in memory; exp and division do not.
                gate_T1 = 1.0 / (1.0 + torch.exp(-self.shared_gate(x_TE).float()))
                shared_TE = gate_T1.to(x_TE.dtype) * shared_TE
            out_TE = out_TE + shared_TE
        return self._tp.all_reduce(out_TE)


def build_mixer(shape: AttentionShape | PartShape, layer: int, context: BlockContext) -> Mixer:
    """Return what a layer has in the place of attention, a module."""
    if isinstance(shape, AttentionShape):
        return AttentionBlock(layer, shape, context)
    return cast(Mixer, shape.build(layer, context))


def build_mlp(
    shape: MlpShape | MoeShape | PartShape, layer: int, context: BlockContext
) -> nn.Module:
    """Return the MLP of a layer."""
    if isinstance(shape, MlpShape):
        return MlpBlock(shape, context)
    if isinstance(shape, MoeShape):
        return MoeBlock(shape, context)
    return shape.build(layer, context)


class DecoderBlock(nn.Module):
    """One decoder layer around the residual stream.

    A block takes the residual stream and the part of it that is still to be added (`delta`), so
    that adding and the norms around it are one pass over memory, and returns both.
    """

    attention: Mixer | None

    def __init__(self, layer: int, shape: LayerShape, context: BlockContext) -> None:
        super().__init__()
        self._layer = layer
        self.residual_scale = context.residual_scale

        def make_norm(is_there: bool) -> RMSNorm | None:
            return context.make_norm(context.hidden_size) if is_there else None

        has_mixer, has_mlp = shape.attention is not None, shape.mlp is not None
        self.input_norm = make_norm(has_mixer)
        self.attention = (
            None if shape.attention is None else build_mixer(shape.attention, layer, context)
        )
        self.post_attention_norm = make_norm(has_mixer and context.has_post_norms)
        self.mlp_norm = make_norm(has_mlp)
        self.mlp = None if shape.mlp is None else build_mlp(shape.mlp, layer, context)
        self.post_mlp_norm = make_norm(has_mlp and context.has_post_norms)

    @property
    def spec(self) -> LayerCacheSpec:
        """What the layer keeps."""
        if self.attention is None:
            return LayerCacheSpec(layer=self._layer, fields=(), lifetime=Nothing(), kind="nothing")
        return self.attention.spec

    @property
    def kernel_layer(self) -> Attention | None:
        """The attention whose kernel the worker chooses, or None."""
        return None if self.attention is None else self.attention.kernel_layer

    def forward(
        self,
        delta: Delta | None,
        residual_TE: Tensor,
        batch: ForwardBatch,
        attention: AttentionState,
    ) -> tuple[Delta | None, Tensor]:
        """Run the layer; `delta` and `residual` are overwritten.

        Returns:
            The layer's last contribution, still to be added, and the residual stream without it.
        """
        return self.run_mlp(self.mix(delta, residual_TE, batch, attention), residual_TE)

    def mix(
        self,
        delta: Delta | None,
        residual_TE: Tensor,
        batch: ForwardBatch,
        attention: AttentionState,
        tokens_L: Tensor | None = None,
    ) -> Delta | None:
        """Run what has tokens see each other; return its contribution to `tokens_L`, see Mixer."""
        if self.attention is not None and self.input_norm is not None:
            x_TE = add_and_norm(self.input_norm, delta, residual_TE)
            given_TE = self.attention(x_TE, batch, attention, tokens_L)
            delta = self._make_delta(given_TE, self.post_attention_norm)
        return delta

    def run_mlp(self, delta: Delta | None, residual_TE: Tensor) -> tuple[Delta | None, Tensor]:
        """Run what takes each token for itself; see `forward`."""
        if self.mlp is not None and self.mlp_norm is not None:
            x_TE = self.mlp(add_and_norm(self.mlp_norm, delta, residual_TE))
            delta = self._make_delta(x_TE, self.post_mlp_norm)
        return delta, residual_TE

    def _make_delta(self, x_TE: Product, post_norm: RMSNorm | None) -> Delta:
        delta = Delta(x_TE=x_TE, norm=post_norm)
        if self.residual_scale == 1.0:
            return delta
        return Delta(x_TE=delta.finish() * self.residual_scale, norm=None)
