"""Experts with biases, interleaved gate and up rows and a clamped gate, as gpt-oss has them.

Built by `models/gpt_oss.py`; routing is the caller's. Each rank holds its share of every expert's
inner size, so that the ranks' results add up.

Shapes: T tokens, E hidden size, I inner size of this rank, N experts, k experts a token.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm._custom_ops import linear as linear_ops
from vllm._custom_ops import moe as moe_ops
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.weight_place import PackedModule, Shard, WeightPlace


class _ExpertMatrices(nn.Module):
    """One matrix and one bias for each expert: y = x W^T + b."""

    packed: Tensor | None

    def __init__(self, num_experts: int, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_rows = rows

        def make(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, dtype=dtype), requires_grad=False)

        self.weight: nn.Parameter | None = make(rows, columns)
        self.bias = make(rows)
        self.register_buffer("packed", None, persistent=False)

    def view_transposed(self) -> Tensor:
        """Return the weights as [N, columns, rows], the form of checkpoints."""
        assert self.weight is not None, "weights are packed already"
        return self.weight.data.transpose(1, 2)

    def pack(self) -> None:
        if self.weight is None or self.weight.device.type != "cpu":
            return
        self.packed = linear_ops.pack_weight_stack(self.weight.data)
        self.weight = None

    def multiply(self, expert: int, x_TK: Tensor, *, has_bias: bool = True) -> Tensor:
        bias = self.bias[expert] if has_bias else None
        if self.packed is None:
            assert self.weight is not None
            return F.linear(x_TK, self.weight[expert], bias)
        out_TN = x_TK.new_empty(x_TK.shape[0], self.num_rows)
        linear_ops.linear(out_TN, x_TK, self.packed[expert], bias)
        return out_TN


class BiasedExperts(PackedModule):
    """N experts: down((up + 1) * gate * sigmoid(alpha * gate)), gate and up clamped.

    Args:
        intermediate_size: inner size of one expert over all ranks.
        alpha: slope of the gate's sigmoid.
        limit: gate is at most this, up lies within plus and minus this.

    Attributes:
        gate_up: matrices [2 I, E], rows gate 0, up 0, gate 1, up 1 ...
        down: matrices [E, I].
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
        self.gate_up = _ExpertMatrices(num_experts, 2 * self.inner_size, hidden_size, dtype)
        self.down = _ExpertMatrices(num_experts, hidden_size, self.inner_size, dtype)

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; a checkpoint stores all experts of a layer in one tensor, [N, in, out].

        Gate and up of one inner element lie side by side, so that a rank's part is one piece.
        """
        assert shard is None
        count, hidden, total = self.num_experts, self.hidden_size, self.total_size
        start = self._rank * self.inner_size
        shape: tuple[int, ...]
        if field == "gate_up_proj":
            shape, target = (count, hidden, 2 * total), self.gate_up.view_transposed()
            return WeightPlace(shape=shape, target=target, axis=2, start=2 * start)
        if field == "gate_up_proj_bias":
            shape, target = (count, 2 * total), self.gate_up.bias.data
            return WeightPlace(shape=shape, target=target, axis=1, start=2 * start)
        if field == "down_proj":
            shape, target = (count, total, hidden), self.down.view_transposed()
            return WeightPlace(shape=shape, target=target, axis=1, start=start)
        return WeightPlace(shape=(count, hidden), target=self.down.bias.data)

    def pack(self) -> None:
        """Bring the experts into the CPU kernel's layout, free the originals; no-op elsewhere."""
        self.gate_up.pack()
        self.down.pack()

    def forward(self, x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        They are added up in the order of their numbers on a CPU, of the choices on a GPU.

        Args:
            x_TE: hidden states.
            weights_TK: float32 [T, k].
            ids_TK: int32 [T, k].

        Returns:
            [T, E], this rank's part of the sum; the caller adds the ranks up.
        """
        if x_TE.is_cuda:
            return self._run_fused(x_TE, weights_TK, ids_TK)
        total_TE = torch.zeros_like(x_TE, dtype=torch.float32)
        for expert in ids_TK.unique().tolist():
            tokens, places = torch.where(ids_TK == expert)
            part_TE = self._run_expert(expert, x_TE[tokens])
            total_TE.index_add_(0, tokens, part_TE.float() * weights_TK[tokens, places, None])
        return total_TE.to(x_TE.dtype)

    def _run_fused(self, x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        assert self.gate_up.weight is not None and self.down.weight is not None
        out_TE = torch.empty_like(x_TE)
        moe_ops.fused_biased_experts(
            out_TE,
            x_TE,
            self.gate_up.weight,
            self.gate_up.bias,
            self.down.weight,
            self.down.bias if self._rank == 0 else None,  # the ranks' parts are added up
            weights_TK,
            ids_TK,
            self.alpha,
            self.limit,
        )
        return out_TE

    def _run_expert(self, expert: int, x_TE: Tensor) -> Tensor:
        gate_up = self.gate_up.multiply(expert, x_TE).float()
        gate_TI = gate_up[:, 0::2].clamp(max=self.limit)
        up_TI = gate_up[:, 1::2].clamp(min=-self.limit, max=self.limit)
        # torch.sigmoid rounds an element by its place in memory; exp and division do not.
        inner_TI = (up_TI + 1.0) * (gate_TI / (1.0 + torch.exp(gate_TI * -self.alpha)))
        # The ranks' parts are added up: only one of them brings the bias.
        return self.down.multiply(expert, inner_TI.to(x_TE.dtype), has_bias=self._rank == 0)
