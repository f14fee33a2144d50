"""Products of few rows whose sums over K are not added up yet.

On a GPU the programs of such a product share K. Where the op that comes next reads the results
anyway, it adds up what each of them has: nobody waits for the last to arrive. `linear.py` leaves
parts where `linear_table.count_parts` says so, and only to who takes them: `layernorm.py` and
`models/heads.py`. Who leaves and who takes is decided when blocks are built.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductParts:
    """A product [T, N] that is still to be added up, in the order of its parts.

    Attributes:
        parts_PTN: float32, contiguous.
        bias_N: of `dtype`, added to the sum before it is rounded, or None.
        dtype: element type of the product.
    """

    parts_PTN: Tensor
    bias_N: Tensor | None
    dtype: torch.dtype

    def new_empty(self) -> Tensor:
        """Return uninitialised memory for the product, [T, N]."""
        return self.parts_PTN.new_empty(self.parts_PTN.shape[1:], dtype=self.dtype)


Product = Tensor | ProductParts
