"""The Mamba-2 mixer of Bamba, Granite 4 and Nemotron-H: convolution, scan, gated norm of groups.

Built by `models/state_parts.py`; the arithmetic is `_custom_ops/state_space.py`. Heads are split
over the ranks; groups of B and C are split with them, a single group is copied. Source:
Transformers are SSMs, arXiv 2405.21060.

Shapes: T tokens, E hidden size, H heads of size P, G groups of state size N, all of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
from vllm.model_executor.layers.weight_place import PackedModule
from vllm.types import DType
from vllm.utils.tensors import from_torch_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Sizes:
    """Sizes and constants of a Mamba-2 mixer over all ranks.

    Attributes:
        num_groups: groups of heads that share B and C, and that are normed together.
        conv_taps: length of the convolution's filters.
        dt_min, dt_max: limits of the time step.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    conv_taps: int
    conv_bias: bool
    proj_bias: bool
    dt_min: float
    dt_max: float


class Mamba2Mixer(PackedModule):
    """A selective state space with a state of P x N for each head.

    Attributes:
        spec: the last inputs of the convolution, and the state, once a sequence.
        kernel_layer: None, the layer has no attention kernel.
        decay_H: A of each head, float32; None until weights are packed.
    """

    kernel_layer: None = None
    decay_H: Tensor | None

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        sizes: Mamba2Sizes,
        *,
        epsilon: float,
        dtype: torch.dtype,
        state_dtype: DType = DType.FLOAT32,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        split = _Mamba2Split(sizes, tp)
        self._layer = layer
        self._sizes = sizes
        self._tp = tp
        self._inner = split.inner
        self._shared = split.shared
        self._num_heads = split.num_heads
        gate_size = sizes.num_heads * sizes.head_size
        self.in_proj = RowSelectLinear(
            hidden_size, {None: split.in_rows()}, bias=sizes.proj_bias, dtype=dtype
        )
        self.conv = CausalConv(
            split.conv_rows(), sizes.conv_taps, bias=sizes.conv_bias, silu=True, dtype=dtype
        )
        self.heads = FloatVectors(
            ("A_log", "D", "dt_bias"), split.num_heads, split.first_head, sizes.num_heads
        )
        self.register_buffer("decay_H", None, persistent=False)
        self.norm = GatedRMSNorm(
            split.inner,
            tp.rank * split.inner,
            gate_size,
            group_size=split.inner // split.num_groups,
            gate_first=True,
            epsilon=epsilon,
            dtype=dtype,
        )
        self.out_proj = RowParallelLinear(
            gate_size, hidden_size, bias=sizes.proj_bias, dtype=dtype, tp=tp
        )
        shape = (split.num_heads, sizes.head_size, sizes.state_size)
        self.spec = make_state_spec(
            layer,
            self.conv.cache_field(from_torch_dtype(dtype)),
            state_field("state", shape, state_dtype),
        )

    def pack(self) -> None:
        """Compute what steps would else compute again from the weights."""
        self.decay_H = -self.heads.vector("A_log").exp()

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
        inner, shared, sizes = self._inner, self._shared, self._sizes
        parts = (inner, inner + 2 * shared, self._num_heads)
        gate_TC, xbc_TC, dt_TH = self.in_proj(x_TE).split(parts, dim=-1)
        out_TC = rows.make_like(gate_TC)
        out = out_TC.unflatten(-1, (-1, sizes.head_size))
        a_log, skip, dt_bias = map(self.heads.vector, ("A_log", "D", "dt_bias"))
        limits = (sizes.dt_min, sizes.dt_max)
        has_whole_groups = self._tp.size == 1 or sizes.num_groups > 1
        if rows.others is not None:
            mixed = self.conv(xbc_TC, conv_state, rows.others)
            x, b, c = mixed.split((inner, shared, shared), dim=-1)
            x = x.unflatten(-1, (-1, sizes.head_size))
            b, c = (t.unflatten(-1, (-1, sizes.state_size)) for t in (b, c))
            decay_H = -a_log.exp() if self.decay_H is None else self.decay_H
            state_ops.mamba2_scan(
                out, x, dt_TH, decay_H, b, c, skip, dt_bias, state, *rows.others, *limits
            )
            if has_whole_groups:
                self.norm(out_TC, gate_TC)  # also over what the step op writes next
        if rows.single is not None:
            gate, weight = (gate_TC, self.norm.weight) if has_whole_groups else (None, None)
            conv = (self.conv.weight_KC.T, self.conv.bias_C)
            states = (conv_state.transpose(1, 2), state)
            state_ops.mamba2_step(
                out, xbc_TC, dt_TH, gate, *conv, a_log, skip, dt_bias, weight, *states,
                *rows.single, *limits, self.norm.epsilon,
            )  # fmt: skip
        if not has_whole_groups:
            out_TC = self._norm_over_ranks(out_TC, gate_TC)
        return self.out_proj.contribute(out_TC, tokens_L)

    def _norm_over_ranks(self, x_TC: Tensor, gate_TC: Tensor) -> Tensor:
        """Norm channels of which every rank holds a part."""
        gate = gate_TC.float()
        x = x_TC.float() * (gate / (1.0 + torch.exp(-gate)))
        total = self._tp.all_reduce(x.square().sum(-1, keepdim=True))
        mean = total / (self._sizes.num_heads * self._sizes.head_size)
        return (x * torch.rsqrt(mean + self.norm.epsilon)).to(x_TC.dtype) * self.norm.weight


class _Mamba2Split:
    """Which rows of the checkpoint's tensors a rank takes."""

    def __init__(self, sizes: Mamba2Sizes, tp: TensorParallel) -> None:
        if sizes.num_heads % sizes.num_groups:
            raise ConfigError(
                f"the number of Mamba heads ({sizes.num_heads}) must be a multiple of the number "
                f"of groups ({sizes.num_groups})"
            )
        is_shared = sizes.num_groups == 1  # every rank needs the only group
        self._sizes = sizes
        self.num_heads = tp.split(sizes.num_heads, "number of Mamba heads")
        self.num_groups = 1 if is_shared else tp.split(sizes.num_groups, "number of Mamba groups")
        self.first_head = tp.rank * self.num_heads
        self.inner = self.num_heads * sizes.head_size
        self.shared = self.num_groups * sizes.state_size
        self._first_inner = tp.rank * self.inner
        self._first_shared = 0 if is_shared else tp.rank * self.shared

    def in_rows(self) -> RowSelection:
        """Return the rows of the projection to gate, x, B, C and dt."""
        inner = self._sizes.num_heads * self._sizes.head_size
        starts = {name: inner + start for name, start in self._conv_starts().items()}
        conv_size = self.conv_rows().total
        return RowSelection.of_parts(
            {"gate": self.inner, **self._conv_parts(), "dt": self.num_heads},
            {"gate": self._first_inner, **starts, "dt": inner + conv_size + self.first_head},
            inner + conv_size + self._sizes.num_heads,
        )

    def conv_rows(self) -> RowSelection:
        """Return the channels x, B and C."""
        sizes = self._sizes
        total = sizes.num_heads * sizes.head_size + 2 * sizes.num_groups * sizes.state_size
        return RowSelection.of_parts(self._conv_parts(), self._conv_starts(), total)

    def _conv_parts(self) -> dict[str, int]:
        return {"x": self.inner, "B": self.shared, "C": self.shared}

    def _conv_starts(self) -> dict[str, int]:
        inner = self._sizes.num_heads * self._sizes.head_size
        shared = self._sizes.num_groups * self._sizes.state_size
        return {
            "x": self._first_inner,
            "B": inner + self._first_shared,
            "C": inner + shared + self._first_shared,
        }
