"""What a model consists of, as data: one shape for each layer, and what surrounds the layers.

A family's file reads a checkpoint's config into a `ModelShape`; `blocks.py` and `causal_lm.py`
build the modules from it. No tensors, no names of weights; sizes are those of the whole model, over
all ranks. What only one family has brings a `PartShape` of its own, which builds its module itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from vllm.model_executor.models.block_context import BlockContext


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Softmax attention of one layer.

    Attributes:
        scale: factor of the logits.
        rope: rope settings ("rope_type" ...), or None for a layer without positions.
        qkv_bias, out_bias: whether the projections have biases.
        has_qk_norm: whether each head's query and key are normed before they turn.
        window: tokens that stay visible, the current one counted; 0 is all.
        soft_cap: c of c*tanh(x/c) on the scaled logits; 0 is none.
        kind: name of the layer type.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    rope: Mapping[str, Any] | None
    qkv_bias: bool = False
    out_bias: bool = False
    has_qk_norm: bool = False
    window: int = 0
    soft_cap: float = 0.0
    kind: str = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpShape:
    """A gated MLP.

    Attributes:
        activation: "silu", "gelu" or "gelu_tanh".
    """

    intermediate_size: int
    activation: str
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """A mixture of gated MLPs.

    Attributes:
        num_chosen: experts that a token takes.
        intermediate_size: inner size of one expert.
        renormalize: whether the chosen experts' probabilities are scaled to sum to 1.
        shared_size: inner size of the expert that every token takes too; 0 is none.
        has_shared_gate: whether a gate scales what the shared expert adds.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    activation: str
    renormalize: bool
    shared_size: int = 0
    has_shared_gate: bool = True


class PartShape(Protocol):
    """A part of a layer, for families whose attention or MLP is of another kind."""

    def build(self, layer: int, context: BlockContext) -> nn.Module:
        """Return the module of decoder layer `layer`.

        In place of attention it is a `blocks.Mixer`; in place of an MLP its forward takes and
        returns [T, E].
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One decoder layer; a part that is None is absent, with the norm before it."""

    attention: AttentionShape | PartShape | None
    mlp: MlpShape | MoeShape | PartShape | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only model.

    Attributes:
        max_positions: max_position_embeddings of the config.
        norm_epsilon: added to the mean square in every norm.
        has_unit_offset_norm: whether norms scale by 1 + w (Gemma).
        has_float_norm: whether norms keep a float32 weight and round once, after the product.
        has_post_norms: whether the outputs of attention and MLP are normed before they are added.
        residual_scale: factor of what attention and MLP add to the residual stream.
        embed_scale: factor of the embeddings, rounded to the model's dtype; 1 is none.
        is_tied: whether the embedding is the output matrix too.
        logit_scale, logit_cap: applied to the logits in this order; 1 and 0 are none.
    """

    vocab_size: int
    hidden_size: int
    max_positions: int
    layers: tuple[LayerShape, ...]
    norm_epsilon: float
    has_unit_offset_norm: bool = False
    has_float_norm: bool = False
    has_post_norms: bool = False
    residual_scale: float = 1.0
    embed_scale: float = 1.0
    is_tied: bool = False
    logit_scale: float = 1.0
    logit_cap: float = 0.0
