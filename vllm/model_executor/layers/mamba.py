"""The Mamba-2 mixer of Bamba, Granite 4 and Nemotron-H: convolution, scan, gated norm of groups.

Built by `models/state_parts.py`; the arithmetic is `_custom_ops/state_space.py`. Heads are split
over the ranks; groups of B and C are split with them, a single group is copied. Source:
Transformers are SSMs, arXiv 2405.21060.

Shapes: T tokens, E hidden size, H heads of size P, G groups of state size N, all of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vllm._custom_ops import state_space as state_ops
from vllm.batch import AttentionState, ForwardBatch
from vllm.cache_spec import LayerCacheSpec, State
from vllm.distributed.parallel_state import TensorParallel
from vllm.errors import ConfigError
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.row_select_linear import RowSelection, RowSelectLinear
from vllm.model_executor.layers.state import (
    STATE_KIND,
    CausalConv,
    FloatVectors,
    GatedRMSNorm,
    StateRows,
    state_field,
)
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


class Mamba2Mixer(nn.Module):
    """A selective state space with a state of P x N for each head.

    Attributes:
        spec: the last inputs of the convolution, and the state in float32 (whatever a checkpoint's
            mamba_ssm_cache_dtype allows to save), once a sequence.
        kernel_layer: None, the layer has no attention kernel.
    """

    kernel_layer: None = None

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        sizes: Mamba2Sizes,
        *,
        epsilon: float,
        dtype: torch.dtype,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self._layer = layer
        self._sizes = sizes
        self._tp = tp
        heads = tp.split(sizes.num_heads, "number of Mamba heads")
        groups = _split_groups(sizes, tp)
        self._inner = heads * sizes.head_size
        self._shared = groups * sizes.state_size
        self._num_heads = heads
        first_group = tp.rank * groups if sizes.num_groups > 1 else 0
        starts = _part_starts(sizes, tp.rank * self._inner, first_group * sizes.state_size)
        inner, shared = self._inner, self._shared
        conv_parts = {"x": inner, "B": shared, "C": shared}
        gate_size = sizes.num_heads * sizes.head_size
        conv_size = gate_size + 2 * sizes.num_groups * sizes.state_size
        starts["dt"] += tp.rank * heads
        self.in_proj = RowSelectLinear(
            hidden_size,
            {
                None: RowSelection.of_parts(
                    {"gate": inner, **conv_parts, "dt": heads},
                    starts,
                    gate_size + conv_size + sizes.num_heads,
                )
            },
            bias=sizes.proj_bias,
            dtype=dtype,
        )
        conv_starts = {name: starts[name] - gate_size for name in conv_parts}
        self.conv = CausalConv(
            RowSelection.of_parts(conv_parts, conv_starts, conv_size),
            sizes.conv_taps,
            bias=sizes.conv_bias,
            silu=True,
            dtype=dtype,
        )
        self.heads = FloatVectors(
            ("A_log", "D", "dt_bias"), heads, tp.rank * heads, sizes.num_heads
        )
        self.norm = GatedRMSNorm(
            inner,
            tp.rank * inner,
            gate_size,
            group_size=inner // groups,
            gate_first=True,
            epsilon=epsilon,
            dtype=dtype,
        )
        self.out_proj = RowParallelLinear(
            gate_size, hidden_size, bias=sizes.proj_bias, dtype=dtype, tp=tp
        )
        self.spec = LayerCacheSpec(
            layer=layer,
            fields=(
                self.conv.cache_field(from_torch_dtype(dtype)),
                state_field("state", (heads, sizes.head_size, sizes.state_size), DType.FLOAT32),
            ),
            lifetime=State(),
            kind=STATE_KIND,
        )

    def forward(self, x_TE: Tensor, batch: ForwardBatch, attention: AttentionState) -> Tensor:
        """Return the contribution to the residual stream, [T, E], and move the states on."""
        rows = StateRows.read(self._layer, batch, attention)
        conv_state, state = rows.fields
        inner, shared, sizes = self._inner, self._shared, self._sizes
        parts = (inner, inner + 2 * shared, self._num_heads)
        gate_TC, xbc_TC, dt_TH = self.in_proj(x_TE).split(parts, dim=-1)
        x, b, c = self.conv(xbc_TC, conv_state, rows).split((inner, shared, shared), dim=-1)
        out_TC = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        state_ops.mamba2_scan(
            out_TC.unflatten(-1, (-1, sizes.head_size)),
            x.unflatten(-1, (-1, sizes.head_size)),
            dt_TH,
            -self.heads.vector("A_log").exp(),
            b.unflatten(-1, (-1, sizes.state_size)),
            c.unflatten(-1, (-1, sizes.state_size)),
            self.heads.vector("D"),
            self.heads.vector("dt_bias"),
            state,
            rows.offsets,
            rows.cu_query_lens,
            rows.num_computed,
            sizes.dt_min,
            sizes.dt_max,
        )
        if self._tp.size > 1 and sizes.num_groups == 1:
            return self.out_proj(self._norm_over_ranks(out_TC, gate_TC))
        return self.out_proj(self.norm(out_TC, gate_TC))

    def _norm_over_ranks(self, x_TC: Tensor, gate_TC: Tensor) -> Tensor:
        """Norm channels of which every rank holds a part."""
        gate = gate_TC.float()
        x = x_TC.float() * (gate / (1.0 + torch.exp(-gate)))
        total = self._tp.all_reduce(x.square().sum(-1, keepdim=True))
        mean = total / (self._sizes.num_heads * self._sizes.head_size)
        return (x * torch.rsqrt(mean + self.norm.epsilon)).to(x_TC.dtype) * self.norm.weight


def _split_groups(sizes: Mamba2Sizes, tp: TensorParallel) -> int:
    if sizes.num_heads % sizes.num_groups:
        raise ConfigError(
            f"the number of Mamba heads ({sizes.num_heads}) must be a multiple of the number of "
            f"groups ({sizes.num_groups})"
        )
    if sizes.num_groups == 1:
        return 1
    return tp.split(sizes.num_groups, "number of Mamba groups")


def _part_starts(sizes: Mamba2Sizes, inner_start: int, shared_start: int) -> dict[str, int]:
    """Return where the parts of this rank begin in the rows of the input projection."""
    inner = sizes.num_heads * sizes.head_size
    shared = sizes.num_groups * sizes.state_size
    return {
        "gate": inner_start,
        "x": inner + inner_start,
        "B": 2 * inner + shared_start,
        "C": 2 * inner + shared + shared_start,
        "dt": 2 * inner + 2 * shared,
    }
