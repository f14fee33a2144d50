"""A linear layer whose rows are picked out of the checkpoint's tensors one by one.

For projections that a checkpoint interleaves by head, or joins to one tensor of several parts, of
which each rank takes its own heads. Built by layers with states and by gated attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.layers.weight_place import Shard, WeightPlace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSelection:
    """What a rank takes of one tensor of the checkpoint.

    Attributes:
        total: rows of the checkpoint's tensor.
        rows: int64 on the CPU, the rows that this rank takes, in the order of its outputs.
    """

    total: int
    rows: Tensor

    @staticmethod
    def of_parts(sizes: Mapping[str, int], starts: Mapping[str, int], total: int) -> RowSelection:
        """Return a selection of contiguous parts, in the order of `sizes`.

        On the CPU also where a model is built on the meta device, on which torch's `arange` takes
        seconds: it imports a tracing compiler.
        """
        firsts = [starts[name] for name in sizes]
        ranges = [
            torch.arange(first, first + n, device="cpu")
            for first, n in zip(firsts, sizes.values(), strict=True)
        ]
        return RowSelection(total=total, rows=torch.cat(ranges))


class RowSelectLinear(Linear):
    """A matrix of selected rows.

    Args:
        shards: shard name -> its rows; outputs are the shards' one after the other. None names the
            only one.
    """

    def __init__(
        self,
        input_size: int,
        shards: Mapping[str | None, RowSelection],
        *,
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        size = sum(len(selection.rows) for selection in shards.values())
        super().__init__(input_size, size, bias=bias, dtype=dtype)
        self._shards: dict[Shard, tuple[RowSelection, int]] = {}
        first = 0
        for name, selection in shards.items():
            self._shards[name] = (selection, first)
            first += len(selection.rows)

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; shards are the names that the layer was built with."""
        selection, first = self._shards[shard]
        target = self.parameter(field)[first : first + len(selection.rows)]
        return WeightPlace(
            shape=(selection.total, *target.shape[1:]), target=target, rows=selection.rows
        )
