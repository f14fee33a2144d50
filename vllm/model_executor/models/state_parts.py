"""Shapes of the parts that keep a state, as families put them into their layers.

Read by the families' files; each shape builds its layer. Sizes are those of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.hybrid.state_dtype import read_state_dtype
from vllm.model_executor.layers.linear_attention import DeltaNetSizes, GatedDeltaNet
from vllm.model_executor.layers.mamba import Mamba2Mixer, Mamba2Sizes
from vllm.model_executor.layers.short_conv import ShortConv
from vllm.model_executor.layers.state import require_silu
from vllm.model_executor.models.block_context import BlockContext
from vllm.types import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetShape:
    """A gated delta net, and what its states are kept in."""

    sizes: DeltaNetSizes
    state_dtype: DType

    def build(self, layer: int, context: BlockContext) -> GatedDeltaNet:
        """See PartShape."""
        return GatedDeltaNet(
            layer,
            context.hidden_size,
            self.sizes,
            epsilon=context.norm_epsilon,
            dtype=context.dtype,
            state_dtype=self.state_dtype,
            tp=context.tp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shape:
    """A Mamba-2 mixer, and what its states are kept in."""

    sizes: Mamba2Sizes
    state_dtype: DType

    def build(self, layer: int, context: BlockContext) -> Mamba2Mixer:
        """See PartShape."""
        return Mamba2Mixer(
            layer,
            context.hidden_size,
            self.sizes,
            epsilon=context.norm_epsilon,
            dtype=context.dtype,
            state_dtype=self.state_dtype,
            tp=context.tp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvShape:
    """A short convolution.

    Attributes:
        taps: length of the filters.
        bias: whether projections and convolution have biases.
    """

    taps: int
    bias: bool

    def build(self, layer: int, context: BlockContext) -> ShortConv:
        """See PartShape."""
        return ShortConv(
            layer,
            context.hidden_size,
            self.taps,
            bias=self.bias,
            dtype=context.dtype,
            tp=context.tp,
        )


def read_delta_net(config: Mapping[str, Any], *, is_interleaved: bool) -> DeltaNetShape:
    """Return the gated delta net of Qwen3-Next and Qwen3.5."""
    require_silu(config["hidden_act"], "hidden_act")
    return DeltaNetShape(
        sizes=DeltaNetSizes(
            key_heads=config["linear_num_key_heads"],
            value_heads=config["linear_num_value_heads"],
            key_size=config["linear_key_head_dim"],
            value_size=config["linear_value_head_dim"],
            conv_taps=config["linear_conv_kernel_dim"],
            is_interleaved=is_interleaved,
        ),
        state_dtype=read_state_dtype(config),
    )


def read_mamba2(config: Mapping[str, Any]) -> Mamba2Shape:
    """Return the Mamba-2 mixer of Bamba and Granite 4."""
    require_silu(config["hidden_act"], "hidden_act")
    dt_min, dt_max = config.get("time_step_limit") or (0.0, float("inf"))
    return Mamba2Shape(
        sizes=Mamba2Sizes(
            num_heads=config["mamba_n_heads"],
            head_size=config["mamba_d_head"],
            num_groups=config["mamba_n_groups"],
            state_size=config["mamba_d_state"],
            conv_taps=config["mamba_d_conv"],
            conv_bias=bool(config["mamba_conv_bias"]),
            proj_bias=bool(config["mamba_proj_bias"]),
            dt_min=float(dt_min),
            dt_max=float(dt_max),
        ),
        state_dtype=read_state_dtype(config),
    )
