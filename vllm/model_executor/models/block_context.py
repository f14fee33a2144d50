"""What the blocks of one model have in common, beside the shape of each.

Made by `causal_lm.py`, read by whatever is built from a shape (`blocks.py` and the families' own
parts).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.layernorm import PARTS_SIZES, GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import SKINNY_DTYPES
from vllm.model_executor.models.rope_set import RopeSet
from vllm.types import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockContext:
    """What all blocks of a model have in common.

    Attributes:
        has_unit_offset_norm: whether norms scale by 1 + w.
        has_float_norm: whether norms keep a float32 weight.
        residual_scale: factor of what a part adds to the residual stream.
        cache_dtype: element type of K and V in the cache; None is `dtype`.
    """

    hidden_size: int
    norm_epsilon: float
    has_unit_offset_norm: bool
    has_post_norms: bool
    dtype: torch.dtype
    cache_dtype: DType | None
    tp: TensorParallel
    ropes: RopeSet
    has_float_norm: bool = False
    residual_scale: float = 1.0

    def make_norm(self, size: int) -> RMSNorm:
        """Return a norm of this model's kind."""
        kind = GemmaRMSNorm if self.has_unit_offset_norm else RMSNorm
        return kind(size, self.norm_epsilon, torch.float32 if self.has_float_norm else self.dtype)

    @property
    def takes_parts(self) -> bool:
        """Whether the norms around the residual stream add up products, see `layers/parts.py`."""
        is_plain = not self.has_post_norms and self.residual_scale == 1.0
        return is_plain and self.dtype in SKINNY_DTYPES and self.hidden_size in PARTS_SIZES
