"""Experts of two matrices with a squared ReLU between them: Nemotron-H.

Built by `models/nemotron_h.py`. Each rank holds its share of every expert's inner size.

Shapes: T tokens, L input size, I inner size of this rank, N experts, k chosen.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm._custom_ops import linear as linear_ops
from vllm._custom_ops import moe as moe_ops
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.weight_place import PackedModule, Shard, WeightPlace


class Relu2Experts(PackedModule):
    """N MLPs: down(relu(up(x)) ** 2).

    Args:
        inner_size: inner size of one expert over all ranks.

    Attributes:
        up: [N, I, L], down: [N, L, I]; packed by `pack` on a CPU.
    """

    fields: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        inner_size: int,
        *,
        dtype: torch.dtype,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self._input_size = input_size
        self._total = inner_size
        self._inner = tp.split(inner_size, "intermediate size of the experts")
        self._start = tp.rank * self._inner
        up = torch.empty(num_experts, self._inner, input_size, dtype=dtype)
        down = torch.empty(num_experts, input_size, self._inner, dtype=dtype)
        self.up = nn.Parameter(up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; shards are ("up" | "down", expert)."""
        assert isinstance(shard, tuple)
        part, expert = shard
        if part == "down":
            return WeightPlace(
                shape=(self._input_size, self._total),
                target=self.down.data[expert],
                axis=1,
                start=self._start,
            )
        return WeightPlace(
            shape=(self._total, self._input_size),
            target=self.up.data[expert],
            axis=0,
            start=self._start,
        )

    def pack(self) -> None:
        """See PackedModule; no-op but on a CPU."""
        if self.up.device.type == "cpu":
            self.up.data = linear_ops.pack_weight_stack(self.up.data)
            self.down.data = linear_ops.pack_weight_stack(self.down.data)

    def forward(self, x_TL: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [T, L], this rank's part of it.

        They are added up in the order of the choices.

        Args:
            x_TL: inputs.
            weights_TK: float32.
            ids_TK: int32.
        """
        out_TL = torch.empty_like(x_TL)
        moe_ops.fused_relu2_experts(out_TL, x_TL, self.up, self.down, weights_TK, ids_TK)
        return out_TL
