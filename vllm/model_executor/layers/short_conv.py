"""The short convolution of LFM2: a gate before and a gate after a causal convolution.

Built by `models/state_parts.py`; channels are split over the ranks.

Shapes: T tokens, E hidden size, C channels of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm.batch import AttentionState, ForwardBatch
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.parts import Product
from vllm.model_executor.layers.row_select_linear import RowSelection
from vllm.model_executor.layers.state import CausalConv, StateRows, make_state_spec
from vllm.utils.tensors import from_torch_dtype


class ShortConv(nn.Module):
    """C * conv(B * x), where B, C and x are projections of the input.

    Args:
        taps: length of the convolution's filters.
        bias: whether projections and convolution have biases.

    Attributes:
        spec: the last inputs of the convolution, once a sequence.
        kernel_layer: None, the layer has no attention kernel.
    """

    kernel_layer: None = None

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        taps: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self._layer = layer
        self.in_proj = MergedColumnParallelLinear(
            hidden_size,
            {"B": hidden_size, "C": hidden_size, "x": hidden_size},
            bias=bias,
            dtype=dtype,
            tp=tp,
            what="hidden_size",
        )
        channels = tp.split(hidden_size, "hidden_size")
        selection = RowSelection.of_parts({"": channels}, {"": tp.rank * channels}, hidden_size)
        self.conv = CausalConv(selection, taps, bias=bias, silu=False, dtype=dtype)
        self.out_proj = RowParallelLinear(
            hidden_size, hidden_size, bias=bias, dtype=dtype, tp=tp, what="hidden_size"
        )
        self.spec = make_state_spec(layer, self.conv.cache_field(from_torch_dtype(dtype)))

    def forward(
        self,
        x_TE: Tensor,
        batch: ForwardBatch,
        attention: AttentionState,
        tokens_L: Tensor | None = None,
    ) -> Product:
        """Return what `tokens_L` get for the residual stream, and move the states on; see Mixer."""
        rows = StateRows.read(self._layer, batch, attention)
        (state,) = rows.fields
        before_TC, after_TC, given_TC = self.in_proj(x_TE).chunk(3, dim=-1)
        out_TC = self.conv.forward_gated(before_TC, given_TC, after_TC, state, rows)
        return self.out_proj.contribute(out_TC, tokens_L)
