"""What a part of a layer gives to the residual stream, and its addition under the next norm.

Passed on by decoder blocks, so that adding and the norms around it are one pass over memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.parts import Product


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a part of a layer gives to the residual stream, still to be added.

    Attributes:
        x_TE: [T, E]; overwritten by what adds it.
        norm: the norm that it has to pass before, or None.
    """

    x_TE: Product
    norm: RMSNorm | None

    def finish(self) -> Tensor:
        """Return what is to be added."""
        return self.whole_TE if self.norm is None else self.norm.apply_in_place(self.whole_TE)

    @property
    def whole_TE(self) -> Tensor:
        """`x_TE` where it is not for a norm of the residual stream, which alone takes parts."""
        assert isinstance(self.x_TE, Tensor), "parts are left to norms of the residual stream only"
        return self.x_TE


def add_and_norm(norm: RMSNorm, delta: Delta | None, residual_TE: Tensor) -> Tensor:
    """Add `delta` to the residual stream in place and return the normed sum, [T, E]."""
    if delta is None:
        return norm(residual_TE)
    if delta.norm is None:
        return norm.add_and_norm(delta.x_TE, residual_TE)
    return norm.norm_add_and_norm(delta.norm, delta.whole_TE, residual_TE)


def spread(hidden_TE: Tensor, cuts: Sequence[Tensor], num_tokens: int) -> Tensor:
    """Return the hidden states of a whole step, zero for tokens that stayed behind; [T, E].

    Args:
        hidden_TE: of the tokens behind the last cut.
        cuts: int64, the tokens that went on at each cut, among those that went on before.
        num_tokens: T of the step.
    """
    if not cuts:
        return hidden_TE
    tokens = cuts[0]
    for inner in cuts[1:]:
        tokens = tokens[inner]
    whole_TE = hidden_TE.new_zeros(num_tokens, hidden_TE.shape[1])
    whole_TE[tokens] = hidden_TE
    return whole_TE
