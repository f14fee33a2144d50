"""RMS norms.

Built by `models/blocks.py`; the arithmetic is `_custom_ops/norm.py`. Nothing here is split over
ranks: every rank norms whole rows.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm._custom_ops import norm as norm_ops
from vllm.model_executor.layers.parts import Product, ProductParts
from vllm.model_executor.layers.weight_place import Shard, WeightPlace

PARTS_SIZES = range(1280, 4097, 256)
"""Of rows whose sum from parts, addition and norm are one pass."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight; normalised in float32, rounded, then multiplied."""

    fields: ClassVar[tuple[str, ...]] = ("weight",)
    offset: ClassVar[float] = 0.0

    def __init__(self, hidden_size: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype), requires_grad=False)

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; there is one shard, None."""
        target = self.weight.data
        return WeightPlace(shape=tuple(target.shape), target=target, offset=self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed rows of `x`, [..., hidden_size]."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        norm_ops.rms_norm(out, x, self.weight, self.epsilon)
        return out

    def apply_in_place(self, x: Tensor) -> Tensor:
        """Overwrite `x` with its normed rows and return it."""
        norm_ops.rms_norm(x, x, self.weight, self.epsilon)
        return x

    def add_and_norm(self, delta_TE: Product, residual_TE: Tensor) -> Tensor:
        """Add `delta` to `residual` in place and return the normed sum; `delta` is overwritten."""
        if isinstance(delta_TE, ProductParts):
            assert delta_TE.bias_N is None
            out_TE, parts = delta_TE.new_empty(), delta_TE.parts_PTN
            norm_ops.add_parts_rms_norm(out_TE, parts, residual_TE, self.weight, self.epsilon)
            return out_TE
        norm_ops.fused_add_rms_norm(delta_TE, residual_TE, self.weight, self.epsilon)
        return delta_TE

    def norm_add_and_norm(
        self, delta_norm: RMSNorm, delta_TE: Tensor, residual_TE: Tensor
    ) -> Tensor:
        """As `add_and_norm`, but `delta` is normed by `delta_norm` first; one op on a GPU."""
        if not delta_TE.is_cuda or delta_norm.epsilon != self.epsilon:
            return self.add_and_norm(delta_norm.apply_in_place(delta_TE), residual_TE)
        norm_ops.norm_add_rms_norm(
            delta_TE, residual_TE, delta_norm.weight, self.weight, self.epsilon
        )
        return delta_TE


class GemmaRMSNorm(RMSNorm):
    """x / rms(x) * (1 + w): folded at load into a float32 weight, rounded once at the end."""

    offset: ClassVar[float] = 1.0

    def __init__(self, hidden_size: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, epsilon, torch.float32)
