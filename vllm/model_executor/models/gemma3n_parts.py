"""The parts of a Gemma 3n layer: attention that may read another layer's cache, a sparse MLP, and
the layer itself around its streams.

Built from the shapes that `gemma3n.py` reads; knows nothing of the layers before and after, except
for the rows of this step that a layer leaves for those that read its cache.

Shapes: A streams, T tokens, E hidden size, P size of a layer's own input, H heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from vllm.attention.layer import Attention
from vllm.batch import AttentionState, ForwardBatch
from vllm.cache_spec import Full, LayerCacheSpec
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.altup import AltUp, Laurel
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    split_kv_heads,
)
from vllm.model_executor.models.block_context import BlockContext
from vllm.model_executor.models.blocks import DecoderBlock, MlpBlock
from vllm.model_executor.models.shapes import AttentionShape, MlpShape
from vllm.utils.tensors import from_torch_dtype

FreshRows = dict[int, tuple[Tensor | None, Tensor | None]]
"""Layer -> keys and values of this step's tokens, for layers that read its cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAttentionShape:
    """Attention with normed keys and values; see PartShape.

    Attributes:
        reads_from: layer whose keys and values this one attends to, or None.
    """

    heads: AttentionShape
    reads_from: int | None

    def build(self, layer: int, context: BlockContext) -> nn.Module:
        """See PartShape."""
        return SharedAttentionBlock(layer, self, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlpShape:
    """A gated MLP whose gate keeps its largest elements only; see PartShape.

    Attributes:
        sparsity: share of a normal distribution that is cut; 0 is none.
    """

    mlp: MlpShape
    sparsity: float

    def build(self, layer: int, context: BlockContext) -> nn.Module:
        """See PartShape."""
        return SparseMlpBlock(self, context)


class SharedAttentionBlock(nn.Module):
    """Attention over own keys and values, or over those of an earlier layer."""

    def __init__(self, layer: int, shape: SharedAttentionShape, context: BlockContext) -> None:
        super().__init__()
        heads, hidden = shape.heads, context.hidden_size
        assert heads.rope is not None
        dtype, tp = context.dtype, context.tp
        size, bias = heads.head_size, heads.qkv_bias
        self.head_size = size
        self.reads_from = shape.reads_from
        self.layer = layer
        self.qkv: QKVParallelLinear | None = None
        self.query: ColumnParallelLinear | None = None
        self.k_norm: RMSNorm | None = None
        self.v_norm: RMSNorm | None = None
        if shape.reads_from is None:
            self.qkv = QKVParallelLinear(
                hidden, size, heads.num_heads, heads.num_kv_heads, bias=bias, dtype=dtype, tp=tp
            )
            self.k_norm = context.make_norm(size)
            self.v_norm = context.make_norm(size)
            self.v_norm.weight.data.fill_(1.0)  # values are normed without a scale
        else:
            self.query = ColumnParallelLinear(
                hidden, heads.num_heads * size, bias=bias, dtype=dtype, tp=tp
            )
        self.q_norm = context.make_norm(size)
        self.out = RowParallelLinear(
            heads.num_heads * size, hidden, bias=heads.out_bias, dtype=dtype, tp=tp
        )
        self.rope = context.ropes.get(size, heads.rope)
        num_kv_heads, _ = split_kv_heads(heads.num_kv_heads, tp)
        self.attention = Attention(
            layer,
            tp.split(heads.num_heads, "num_attention_heads"),
            num_kv_heads,
            size,
            heads.scale,
            Full(),
            dtype=from_torch_dtype(dtype),
            cache_dtype=context.cache_dtype,
            window=heads.window,
            reads_from=shape.reads_from,
        )

    @property
    def spec(self) -> LayerCacheSpec:
        """See Mixer."""
        return self.attention.spec

    @property
    def kernel_layer(self) -> Attention:
        """See Mixer."""
        return self.attention

    def forward(
        self, x_TE: Tensor, fresh: FreshRows, batch: ForwardBatch, attention: AttentionState
    ) -> Tensor:
        """Return the attention's contribution, [T, E].

        Args:
            x_TE: normed hidden states.
            fresh: read or, by a layer with keys and values of its own, extended.
            batch: the step.
            attention: see Attention.
        """
        if self.qkv is not None:
            q_THD = self._project_all(self.qkv, x_TE, fresh, batch)
        else:
            assert self.query is not None
            q_THD = self.q_norm.apply_in_place(self._split_heads(self.query(x_TE)))
            # The op turns keys too; it is given none.
            self.rope(batch.positions, q_THD, q_THD[:, :0])
        source = self.layer if self.reads_from is None else self.reads_from
        out_THD = self.attention(q_THD, *fresh[source], batch, attention)
        return self.out(out_THD.flatten(1))

    def _project_all(
        self, qkv: QKVParallelLinear, x_TE: Tensor, fresh: FreshRows, batch: ForwardBatch
    ) -> Tensor:
        assert self.k_norm is not None and self.v_norm is not None
        parts = qkv(x_TE).split((qkv.q_size, qkv.kv_size, qkv.kv_size), dim=-1)
        q_THD, k_THD, v_THD = (self._split_heads(part) for part in parts)
        self.q_norm.apply_in_place(q_THD)
        self.k_norm.apply_in_place(k_THD)
        self.v_norm.apply_in_place(v_THD)
        self.rope(batch.positions, q_THD, k_THD)
        fresh[self.layer] = (k_THD, v_THD)
        return q_THD

    def _split_heads(self, x_TN: Tensor) -> Tensor:
        return x_TN.unflatten(-1, (-1, self.head_size))


class SparseMlpBlock(MlpBlock):
    """An MLP whose gate is cut at a quantile of the normal distribution with its moments."""

    def __init__(self, shape: SparseMlpShape, context: BlockContext) -> None:
        super().__init__(shape.mlp, context)
        self._tp = context.tp
        self._num_inner = shape.mlp.intermediate_size
        self._is_sparse = shape.sparsity > 0.0
        self._num_deviations = NormalDist().inv_cdf(shape.sparsity) if self._is_sparse else 0.0

    def forward(self, x_TE: Tensor) -> Tensor:
        """Return the MLP's contribution, [T, E]."""
        gate_up = self.gate_up(x_TE)
        if self._is_sparse:
            gate_TI = gate_up[:, : gate_up.shape[1] // 2]
            gate_TI.copy_((gate_TI.float() - self._find_cutoff(gate_TI)).clamp(min=0.0))
        return self.down(self.activation(gate_up))

    def _find_cutoff(self, gate_TI: Tensor) -> Tensor:
        """Return mean + n standard deviations over the gates of all ranks, float32 [T, 1].

        In float64: the order of the sums depends on the number of rows, which rounding hides.
        """
        gate = gate_TI.double()
        mean_T1 = self._sum_over_ranks(gate) / self._num_inner
        variance_T1 = self._sum_over_ranks((gate - mean_T1).square()) / self._num_inner
        return (mean_T1 + variance_T1.sqrt() * self._num_deviations).float()

    def _sum_over_ranks(self, x_TI: Tensor) -> Tensor:
        return self._tp.all_reduce(x_TI.sum(dim=-1, keepdim=True))


class Gemma3nLayer(nn.Module):
    """A decoder block inside its streams: predict, attend, think, correct, add the layer's input.

    Args:
        block: norms, attention and MLP of the layer.
        config: the model's config.
    """

    def __init__(self, block: DecoderBlock, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        self._parts = (block,)  # in a tuple: the block is registered with the model already
        hidden, epsilon = config["hidden_size"], config["rms_norm_eps"]
        size = config["hidden_size_per_layer_input"]
        self.altup = AltUp(
            config["altup_num_inputs"],
            hidden,
            active=config["altup_active_idx"],
            epsilon=epsilon,
            has_output_scale=bool(config["altup_correct_scale"]),
            dtype=dtype,
        )
        self.laurel = Laurel(hidden, config["laurel_rank"], epsilon=epsilon, dtype=dtype)
        self.input_gate = ReplicatedLinear(hidden, size, bias=False, dtype=dtype)
        self.input_projection = ReplicatedLinear(size, hidden, bias=False, dtype=dtype)
        self.input_norm = RMSNorm(hidden, epsilon, torch.float32)
        self.activation = get_act_fn(config["hidden_activation"])

    def forward(
        self,
        streams_ATE: Tensor,
        input_TP: Tensor,
        fresh: FreshRows,
        batch: ForwardBatch,
        attention: AttentionState,
    ) -> Tensor:
        """Return the streams after this layer, [A, T, E].

        Args:
            streams_ATE: the streams before it.
            input_TP: the layer's own input.
            fresh: see SharedAttentionBlock.
            batch: the step.
            attention: see Attention.
        """
        (block,) = self._parts
        assert isinstance(block.attention, SharedAttentionBlock) and block.mlp is not None
        assert block.input_norm is not None and block.post_attention_norm is not None
        assert block.mlp_norm is not None and block.post_mlp_norm is not None
        predicted_ATE = self.altup.predict(streams_ATE)
        active_TE = predicted_ATE[self.altup.active]
        x_TE = block.input_norm(active_TE)
        laurel_TE = self.laurel(x_TE)
        attended_TE = block.attention(x_TE, fresh, batch, attention)
        middle_TE = active_TE + block.post_attention_norm.apply_in_place(attended_TE)
        middle_TE = (middle_TE + laurel_TE) / math.sqrt(2.0)
        thought_TE = block.mlp(block.mlp_norm(middle_TE))
        out_TE = middle_TE + block.post_mlp_norm.apply_in_place(thought_TE)
        corrected_ATE = self.altup.correct(predicted_ATE, out_TE)
        gate_TP = self.activation(self.input_gate(self.altup.scale_output(corrected_ATE)))
        added_TE = self.input_norm.apply_in_place(self.input_projection(gate_TP * input_TP))
        corrected_ATE[1:] += added_TE
        return corrected_ATE
