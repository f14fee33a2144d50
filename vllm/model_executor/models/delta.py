"""What a part of a layer gives to the residual stream, and its addition under the next norm.

Passed on by decoder blocks, so that adding and the norms around it are one pass over memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm.model_executor.layers.layernorm import RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a part of a layer gives to the residual stream, still to be added.

    Attributes:
        x_TE: [T, E]; overwritten by what adds it.
        norm: the norm that it has to pass before, or None.
    """

    x_TE: Tensor
    norm: RMSNorm | None

    def keep(self, rows_L: Tensor) -> Delta:
        """Return that of some tokens, [L, E]."""
        return Delta(x_TE=self.x_TE[rows_L], norm=self.norm)

    def finish(self) -> Tensor:
        """Return what is to be added."""
        return self.x_TE if self.norm is None else self.norm.apply_in_place(self.x_TE)


def add_and_norm(norm: RMSNorm, delta: Delta | None, residual_TE: Tensor) -> Tensor:
    """Add `delta` to the residual stream in place and return the normed sum, [T, E]."""
    if delta is None:
        return norm(residual_TE)
    if delta.norm is None:
        return norm.add_and_norm(delta.x_TE, residual_TE)
    return norm.norm_add_and_norm(delta.norm, delta.x_TE, residual_TE)
