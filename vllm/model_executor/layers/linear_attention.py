"""The gated delta net of Qwen3-Next and Qwen3.5: convolution, gated delta rule, gated norm.

Built by `models/state_parts.py`; the arithmetic is `_custom_ops/state_space.py`. Heads are split
over the ranks by key heads. Source: Gated Delta Networks, arXiv 2412.06464.

Shapes: T tokens, E hidden size, Hk key heads, H value heads, K and V their sizes, all of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vllm._custom_ops import state_space as state_ops
from vllm.batch import AttentionState, ForwardBatch
from vllm.distributed.parallel_state import TensorParallel
from vllm.errors import ConfigError
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.parts import Product
from vllm.model_executor.layers.row_select_linear import RowSelection, RowSelectLinear
from vllm.model_executor.layers.state import (
    CausalConv,
    FloatVectors,
    GatedRMSNorm,
    StateRows,
    make_state_spec,
    state_field,
)
from vllm.types import DType
from vllm.utils.tensors import from_torch_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSizes:
    """Sizes of a gated delta net over all ranks.

    Attributes:
        key_heads, value_heads: heads of q and k, and of v; the former divide the latter.
        conv_taps: length of the convolution's filters.
        is_interleaved: whether the checkpoint joins q, k, v and z (and b and a) key head by key
            head in one tensor, as Qwen3-Next does, or keeps tensors of parts, as Qwen3.5 does.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv_taps: int
    is_interleaved: bool


class GatedDeltaNet(nn.Module):
    """Linear attention with a state of K x V for each value head.

    Attributes:
        spec: the last inputs of the convolution, and the state, once a sequence.
        kernel_layer: None, the layer has no attention kernel.
    """

    kernel_layer: None = None

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        sizes: DeltaNetSizes,
        *,
        epsilon: float,
        dtype: torch.dtype,
        state_dtype: DType = DType.FLOAT32,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        if sizes.value_heads % sizes.key_heads:
            raise ConfigError(
                f"linear_num_value_heads ({sizes.value_heads}) must be a multiple of "
                f"linear_num_key_heads ({sizes.key_heads})"
            )
        split = _DeltaNetSplit(sizes, tp)
        self._layer = layer
        self._sizes = sizes
        self._keys = split.key_heads * sizes.key_size
        self._values = split.value_heads * sizes.value_size
        self._num_heads = split.value_heads
        self.in_proj = RowSelectLinear(hidden_size, split.in_rows(), bias=False, dtype=dtype)
        self.conv = CausalConv(
            split.conv_rows(), sizes.conv_taps, bias=False, silu=True, dtype=dtype
        )
        self.decay = FloatVectors(
            ("A_log", "dt_bias"), split.value_heads, split.first_value_head, sizes.value_heads
        )
        self.norm = GatedRMSNorm(
            sizes.value_size,
            0,
            sizes.value_size,
            group_size=sizes.value_size,
            gate_first=False,
            epsilon=epsilon,
            dtype=dtype,
        )
        self.out_proj = RowParallelLinear(
            sizes.value_heads * sizes.value_size, hidden_size, bias=False, dtype=dtype, tp=tp
        )
        shape = (split.value_heads, sizes.key_size, sizes.value_size)
        self.spec = make_state_spec(
            layer,
            self.conv.cache_field(from_torch_dtype(dtype)),
            state_field("state", shape, state_dtype),
        )

    def forward(
        self,
        x_TE: Tensor,
        batch: ForwardBatch,
        attention: AttentionState,
        tokens_L: Tensor | None = None,
    ) -> Product:
        """Return what `tokens_L` get for the residual stream, and move the states on; see Mixer."""
        rows = StateRows.read(self._layer, batch, attention)
        conv_state, state = rows.fields
        keys, values, heads = self._keys, self._values, self._num_heads
        qkv, z, b, a = self.in_proj(x_TE).split((2 * keys + values, values, heads, heads), dim=-1)
        out_TC = rows.make_like(z)
        key_size, value_size = self._sizes.key_size, self._sizes.value_size
        out, gate = (t.unflatten(-1, (-1, value_size)) for t in (out_TC, z))
        decay = (self.decay.vector("A_log"), self.decay.vector("dt_bias"))
        scale = key_size**-0.5
        if rows.others is not None:
            mixed = self.conv(qkv, conv_state, rows.others)
            q, k, v = mixed.split((keys, keys, values), dim=-1)
            q, k = (t.unflatten(-1, (-1, key_size)) for t in (q, k))
            v = v.unflatten(-1, (-1, value_size))
            g_TH = torch.empty(a.shape, dtype=torch.float32, device=a.device)
            beta_TH = torch.empty_like(g_TH)
            state_ops.delta_rule_gates(g_TH, beta_TH, a, b, *decay)
            state_ops.gated_delta_rule(
                out, q, k, v, g_TH, beta_TH, state, *rows.others, scale, True
            )
            self.norm(out_TC, z)  # also over what the step op writes next
        if rows.single is not None:
            weights = (self.conv.weight_KC.T, *decay, self.norm.weight)
            states = (conv_state.transpose(1, 2), state)
            state_ops.gated_delta_step(
                out, qkv, a, b, gate, *weights, *states, *rows.single, scale, self.norm.epsilon
            )
        return self.out_proj.contribute(out_TC, tokens_L)


class _DeltaNetSplit:
    """Which rows of the checkpoint's tensors a rank takes."""

    def __init__(self, sizes: DeltaNetSizes, tp: TensorParallel) -> None:
        self._sizes = sizes
        self._share = sizes.value_heads // sizes.key_heads
        self.key_heads = tp.split(sizes.key_heads, "linear_num_key_heads")
        self.value_heads = self.key_heads * self._share
        self._first_key_head = tp.rank * self.key_heads
        self.first_value_head = tp.rank * self.value_heads

    def in_rows(self) -> Mapping[str | None, RowSelection]:
        """Return the rows of the projection to q, k, v, z, b, a, in this order."""
        if self._sizes.is_interleaved:
            values = self._share * self._sizes.value_size
            key = self._sizes.key_size
            return {
                "qkvz": self._of_key_heads((key, key, values, values)),
                "ba": self._of_key_heads((self._share, self._share)),
            }
        heads = RowSelection.of_parts(
            {"": self.value_heads}, {"": self.first_value_head}, self._sizes.value_heads
        )
        size = self._sizes.value_size
        z = RowSelection.of_parts(
            {"": self.value_heads * size},
            {"": self.first_value_head * size},
            self._sizes.value_heads * size,
        )
        return {"qkv": self.conv_rows(), "z": z, "b": heads, "a": heads}

    def conv_rows(self) -> RowSelection:
        """Return the rows of q, k and v, which lie one after the other."""
        sizes = self._sizes
        keys, values = sizes.key_heads * sizes.key_size, sizes.value_heads * sizes.value_size
        own_keys, first_key = (n * sizes.key_size for n in (self.key_heads, self._first_key_head))
        return RowSelection.of_parts(
            {"q": own_keys, "k": own_keys, "v": self.value_heads * sizes.value_size},
            {
                "q": first_key,
                "k": keys + first_key,
                "v": 2 * keys + self.first_value_head * sizes.value_size,
            },
            2 * keys + values,
        )

    def _of_key_heads(self, parts: tuple[int, ...]) -> RowSelection:
        """Return this rank's rows of a tensor that holds `parts` for each key head."""
        total = self._sizes.key_heads * sum(parts)
        by_head = torch.arange(total, device="cpu").view(self._sizes.key_heads, -1)
        own = by_head[self._first_key_head : self._first_key_head + self.key_heads]
        return RowSelection(
            total=total, rows=torch.cat([part.flatten() for part in own.split(parts, dim=1)])
        )
