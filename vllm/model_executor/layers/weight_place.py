"""Where a tensor of a checkpoint goes: the part of a parameter that this rank keeps.

Layers answer `place(field, shard)`; `models/weight_map.py` checks the shape and writes. Nothing
here knows names of checkpoints or reads files.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

Shard = str | tuple[str, int] | None
"""Which part of a merged parameter: "q", "gate", ("up", expert) ...; None if there is only one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightPlace:
    """The place of one checkpoint tensor.

    Attributes:
        shape: shape that the checkpoint's tensor must have, before any split.
        target: view of the parameter that is overwritten.
        axis: axis of the tensor along which ranks differ, or None if each takes it whole.
        start: first index along `axis` that this rank takes; it takes as many as `target` has.
        rows: int64, the first indices that this rank takes, in the order of `target`; in place of
            `axis` where they do not lie side by side.
        offset: added to every element in float32 before it is stored.
    """

    shape: tuple[int, ...]
    target: Tensor
    axis: int | None = None
    start: int = 0
    rows: Tensor | None = None
    offset: float = 0.0

    def write(self, tensor: Tensor) -> None:
        """Copy this rank's part of `tensor` into the parameter, in its dtype and on its device."""
        part = tensor
        if self.rows is not None:
            part = tensor.index_select(0, self.rows.to(tensor.device)).view_as(self.target)
        if self.axis is not None:
            part = tensor.narrow(self.axis, self.start, self.target.shape[self.axis])
        if self.offset:
            part = part.float() + self.offset
        self.target.copy_(part)


class HoldsWeights(Protocol):
    """A layer with parameters that a checkpoint fills."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of its parameters: "weight", and "bias" where it has one."""
        ...

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """Return where the checkpoint's tensor for one field and shard goes."""
        ...


class HoldsExperts(HoldsWeights, Protocol):
    """A layer with parameters for each of several experts."""

    num_experts: int


class PackedModule(nn.Module):
    """A layer whose weights are brought into the form that kernels read, once they are loaded."""

    @abstractmethod
    def pack(self) -> None:
        """Bring the weights into the kernels' form and free the originals; called once."""
