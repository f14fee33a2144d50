"""What Gemma 3n has around the layers of a decoder: AltUp, Laurel, per-layer inputs.

Built by `models/gemma3n.py`. The residual stream is A streams of which one, the active one, goes
through attention and MLP; the others are predicted and corrected from it. Nothing is split over the
ranks. Every sum runs in an order that does not depend on the number of tokens, so that the bits of
a token do not depend on its batch.

Shapes: A streams, T tokens, E hidden size, P size of a layer's own input.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.weight_place import Shard, WeightPlace


class AltUp(nn.Module):
    """Alternating updates (arXiv 2301.13310): predicts all streams, corrects them by one.

    Args:
        num_streams: A.
        active: index of the stream that attention and MLP see.
        epsilon: of the router's norm.
        has_output_scale: whether the corrected active stream is scaled before it meets the
            per-layer input.

    Attributes:
        correct_output_scale: [E].
    """

    fields: ClassVar[tuple[str, ...]] = ("correct_output_scale",)

    def __init__(
        self,
        num_streams: int,
        hidden_size: int,
        *,
        active: int,
        epsilon: float,
        has_output_scale: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.num_streams = num_streams
        self.active = active
        self._input_scale = 1.0 / hidden_size
        self._has_output_scale = has_output_scale

        def make_linear(columns: int, rows: int) -> ReplicatedLinear:
            return ReplicatedLinear(columns, rows, bias=False, dtype=dtype)

        self.router_norm = RMSNorm(hidden_size, epsilon, torch.float32)
        self.modality_router = make_linear(hidden_size, num_streams)
        self.prediction_coefs = make_linear(num_streams, num_streams**2)
        self.correction_coefs = make_linear(num_streams, num_streams)
        self.correct_output_scale = nn.Parameter(
            torch.empty(hidden_size, dtype=dtype), requires_grad=False
        )

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; the one field is the scale."""
        target = self.correct_output_scale.data
        return WeightPlace(shape=tuple(target.shape), target=target)

    def predict(self, streams_ATE: Tensor) -> Tensor:
        """Return each stream plus a mixture of all streams, [A, T, E]."""
        coefs_TAA = self.prediction_coefs(self._route(streams_ATE[self.active])).unflatten(
            -1, (self.num_streams, self.num_streams)
        )
        predicted_ATE = torch.zeros_like(streams_ATE)
        for source in range(self.num_streams):  # coefficients are laid out [target, source]
            predicted_ATE += streams_ATE[source] * coefs_TAA[:, :, source].T[:, :, None]
        return predicted_ATE.add_(streams_ATE)

    def correct(self, predicted_ATE: Tensor, activated_TE: Tensor) -> Tensor:
        """Return the predictions moved by what the active stream turned out to be, [A, T, E]."""
        coefs_TA = self.correction_coefs(self._route(activated_TE)) + 1.0
        surprise_TE = activated_TE - predicted_ATE[self.active]
        return (surprise_TE * coefs_TA.T[:, :, None]).add_(predicted_ATE)

    def scale_output(self, corrected_ATE: Tensor) -> Tensor:
        """Return the active stream in the scale that the per-layer input expects, [T, E]."""
        active_TE = corrected_ATE[self.active]
        return active_TE * self.correct_output_scale if self._has_output_scale else active_TE

    def _route(self, x_TE: Tensor) -> Tensor:
        routed_TA = self.modality_router(self.router_norm(x_TE) * self._input_scale)
        return torch.tanh(routed_TA.float()).to(x_TE.dtype)


class Laurel(nn.Module):
    """A learned residual of low rank beside attention (arXiv 2411.07501)."""

    def __init__(self, hidden_size: int, rank: int, *, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.left = ReplicatedLinear(hidden_size, rank, bias=False, dtype=dtype)
        self.right = ReplicatedLinear(rank, hidden_size, bias=False, dtype=dtype)
        self.norm = RMSNorm(hidden_size, epsilon, torch.float32)

    def forward(self, x_TE: Tensor) -> Tensor:
        """Return x plus the normed residual, [T, E]."""
        return x_TE + self.norm.apply_in_place(self.right(self.left(x_TE)))


class StreamProjections(nn.Module):
    """Streams 1 … A - 1 from stream 0, or back to a common space; all as long as stream 0."""

    def __init__(self, num_streams: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(
            ReplicatedLinear(hidden_size, hidden_size, bias=False, dtype=dtype)
            for _ in range(1, num_streams)
        )

    def split(self, x_TE: Tensor) -> Tensor:
        """Return x and its projections, [A, T, E]."""
        length_T1 = measure_length(x_TE)
        rest = (_set_length(matrix(x_TE), length_T1) for matrix in self.matrices)
        return torch.stack((x_TE, *rest))

    def join(self, streams_ATE: Tensor) -> Tensor:
        """Return the mean of the projected streams, [T, E]."""
        length_T1 = measure_length(streams_ATE[0])
        total_TE = streams_ATE[0].clone()
        for matrix, stream_TE in zip(self.matrices, streams_ATE[1:], strict=True):
            total_TE += _set_length(matrix(stream_TE), length_T1)
        return total_TE / streams_ATE.shape[0]


def measure_length(x_TE: Tensor) -> Tensor:
    """Return the root mean square of each row, float32 [T, 1].

    The sum runs in float64: its order depends on the number of rows, which rounding to float32
    hides.
    """
    return x_TE.double().square().mean(dim=-1, keepdim=True).sqrt().float()


def _set_length(x_TE: Tensor, length_T1: Tensor) -> Tensor:
    own_T1 = measure_length(x_TE).clamp(min=math.sqrt(1e-5))
    return (x_TE.float() * length_T1 / own_T1).to(x_TE.dtype)
