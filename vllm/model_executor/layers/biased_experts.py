"""Experts with biases, interleaved gate and up rows and a clamped gate, as gpt-oss has them.

Built by `models/gpt_oss.py`; routing is the caller's. Each rank holds its share of every expert's
inner size, so that the ranks' results add up.

Shapes: T tokens, E hidden size, I inner size of this rank, N experts, k experts a token.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm._custom_ops import linear as linear_ops
from vllm._custom_ops import moe as moe_ops
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.weight_place import PackedModule, Shard, WeightPlace


class BiasedExperts(PackedModule):
    """N experts: down((up + 1) * gate * sigmoid(alpha * gate)), gate and up clamped.

    Args:
        intermediate_size: inner size of one expert over all ranks.
        alpha: slope of the gate's sigmoid.
        limit: gate is at most this, up lies within plus and minus this.

    Attributes:
        gate_up: [N, 2 I, E], rows gate 0, up 0, gate 1, up 1 ..., with gate_up_bias [N, 2 I].
        down: [N, E, I], with down_bias [N, E]; both stacks are packed by `pack` on a CPU.
    """

    fields: ClassVar[tuple[str, ...]] = (
        "gate_up_proj",
        "gate_up_proj_bias",
        "down_proj",
        "down_proj_bias",
    )

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        alpha: float,
        limit: float,
        dtype: torch.dtype,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.total_size = intermediate_size
        self.inner_size = tp.split(intermediate_size, "intermediate size of the experts")
        self.alpha = alpha
        self.limit = limit
        self._rank = tp.rank
        self.gate_up = _make(num_experts, 2 * self.inner_size, hidden_size, dtype=dtype)
        self.gate_up_bias = _make(num_experts, 2 * self.inner_size, dtype=dtype)
        self.down = _make(num_experts, hidden_size, self.inner_size, dtype=dtype)
        self.down_bias = _make(num_experts, hidden_size, dtype=dtype)

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; a checkpoint stores all experts of a layer in one tensor, [N, in, out].

        Gate and up of one inner element lie side by side, so that a rank's part is one piece.
        """
        assert shard is None
        count, hidden, total = self.num_experts, self.hidden_size, self.total_size
        start = self._rank * self.inner_size
        shape: tuple[int, ...]
        if field == "gate_up_proj":
            shape, target = (count, hidden, 2 * total), self.gate_up.data.transpose(1, 2)
            return WeightPlace(shape=shape, target=target, axis=2, start=2 * start)
        if field == "gate_up_proj_bias":
            shape, target = (count, 2 * total), self.gate_up_bias.data
            return WeightPlace(shape=shape, target=target, axis=1, start=2 * start)
        if field == "down_proj":
            shape, target = (count, total, hidden), self.down.data.transpose(1, 2)
            return WeightPlace(shape=shape, target=target, axis=1, start=start)
        return WeightPlace(shape=(count, hidden), target=self.down_bias.data)

    def pack(self) -> None:
        """See PackedModule; no-op but on a CPU."""
        if self.gate_up.device.type == "cpu":
            self.gate_up.data = linear_ops.pack_weight_stack(self.gate_up.data)
            self.down.data = linear_ops.pack_weight_stack(self.down.data)

    def forward(self, x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        They are added up in the order of the choices.

        Args:
            x_TE: hidden states.
            weights_TK: float32 [T, k].
            ids_TK: int32 [T, k].

        Returns:
            [T, E], this rank's part of the sum; the caller adds the ranks up.
        """
        out_TE = torch.empty_like(x_TE)
        moe_ops.fused_biased_experts(
            out_TE,
            x_TE,
            self.gate_up,
            self.gate_up_bias,
            self.down,
            self.down_bias if self._rank == 0 else None,  # the ranks' parts are added up
            weights_TK,
            ids_TK,
            self.alpha,
            self.limit,
        )
        return out_TE


def _make(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
