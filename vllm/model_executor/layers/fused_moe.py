"""A mixture of experts: routing and the chosen experts' MLPs.

Built by `models/blocks.py`; the arithmetic is `_custom_ops/moe.py`. Each rank holds its share of
every expert's inner size, so that all ranks route alike and their results add up.

Shapes: T tokens, E hidden size, I inner size of this rank, N experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm._custom_ops import linear as linear_ops
from vllm._custom_ops import moe as moe_ops
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.activation import make_gated_activation
from vllm.model_executor.layers.weight_place import PackedModule, Shard, WeightPlace

MAX_SHARED = 4
"""An MLP beside the experts becomes at most so many of them on a GPU.

It saves five launches of a decode step a layer; those of Qwen3-Next and DeepSeek-V2 are 1 and 2.
"""


class FusedMoE(PackedModule):
    """N gated MLPs of which each token takes the k most likely ones.

    Args:
        intermediate_size: inner size of one expert over all ranks.
        activation: "silu", "gelu" or "gelu_tanh".
        renormalize: whether the k probabilities are scaled to sum to 1.
        shared_size: inner size over all ranks of an MLP that every token takes beside them, or 0.

    Attributes:
        num_shared: as how many further experts a GPU keeps that MLP, see `hold_shared`; 0 is none.
        w13: [N + num_shared, 2 I, E], gate rows then up rows of each expert; None once packed, on a
            CPU only.
        w2: [N + num_shared, E, I]; None once packed.
    """

    fields: ClassVar[tuple[str, ...]] = ("weight",)
    w13_packed: Tensor | None
    w2_packed: Tensor | None

    def __init__(
        self,
        num_experts: int,
        num_chosen: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        renormalize: bool,
        dtype: torch.dtype,
        tp: TensorParallel,
        shared_size: int = 0,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.num_chosen = num_chosen
        self.hidden_size = hidden_size
        self.total_size = intermediate_size
        self.inner_size = tp.split(intermediate_size, "intermediate size of the experts")
        self.activation = activation
        self.renormalize = renormalize
        self._tp = tp
        self.num_shared = 0
        self._activate = make_gated_activation(activation)
        if is_built_on_gpu() and shared_size % intermediate_size == 0:
            num_shared = shared_size // intermediate_size
            self.num_shared = num_shared if num_shared <= MAX_SHARED else 0
        count = num_experts + self.num_shared
        self.w13: nn.Parameter | None = _make_weight(count, 2 * self.inner_size, hidden_size, dtype)
        self.w2: nn.Parameter | None = _make_weight(count, hidden_size, self.inner_size, dtype)
        self.register_buffer("w13_packed", None, persistent=False)
        self.register_buffer("w2_packed", None, persistent=False)

    def place(self, field: str, shard: Shard) -> WeightPlace:
        """See HoldsWeights; shards are ("gate" | "up" | "down", expert)."""
        assert isinstance(shard, tuple) and self.w13 is not None and self.w2 is not None
        part, expert = shard
        start = self._tp.rank * self.inner_size
        if part == "down":
            return WeightPlace(
                shape=(self.hidden_size, self.total_size),
                target=self.w2.data[expert],
                axis=1,
                start=start,
            )
        row = 0 if part == "gate" else self.inner_size
        return WeightPlace(
            shape=(self.total_size, self.hidden_size),
            target=self.w13.data[expert, row : row + self.inner_size],
            axis=0,
            start=start,
        )

    def pack(self) -> None:
        """Bring the experts into the CPU kernel's layout, free the originals; no-op elsewhere."""
        if self.w13 is None or self.w2 is None or self.w13.device.type != "cpu":
            return
        self.w13_packed = linear_ops.pack_weight_stack(self.w13.data)
        self.w13 = None
        self.w2_packed = linear_ops.pack_weight_stack(self.w2.data)
        self.w2 = None

    def hold_shared(self, gate_up_RE: Tensor, down_EI: Tensor) -> None:
        """Copy the weights of the MLP that every token takes behind those of the experts.

        It is cut along its inner size into `num_shared` experts, whose results add up to its own.

        Args:
            gate_up_RE: [2 num_shared I, E], gate rows first.
            down_EI: [E, num_shared I].
        """
        assert self.w13 is not None and self.w2 is not None
        count, inner = self.num_shared, self.inner_size
        parts = gate_up_RE.unflatten(0, (2, count, inner)).transpose(0, 1)  # [S, 2, I, E]
        self.w13.data[self.num_experts :].copy_(parts.flatten(1, 2))
        self.w2.data[self.num_experts :].copy_(down_EI.unflatten(1, (count, inner)).transpose(0, 1))

    def forward(self, x_TE: Tensor, router_TN: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            x_TE: hidden states.
            router_TN: router logits, whole on every rank.

        Returns:
            [T, E], this rank's part of the sum; the caller adds the ranks up.
        """
        num_tokens = x_TE.shape[0]
        weights_TK = x_TE.new_empty(num_tokens, self.num_chosen, dtype=torch.float32)
        ids_TK = torch.empty(num_tokens, self.num_chosen, dtype=torch.int32, device=x_TE.device)
        moe_ops.topk_softmax(weights_TK, ids_TK, router_TN, self.renormalize)
        return self.run_chosen(x_TE, weights_TK, ids_TK)

    def run_chosen(self, x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """Return the weighted sum of experts that were chosen elsewhere; see `forward`.

        Args:
            x_TE: hidden states.
            weights_TK: float32 [T, k].
            ids_TK: int32 [T, k]; those from N on are shared experts, which all tokens have or none.
        """
        w13 = self.w13 if x_TE.is_cuda else self.w13_packed
        w2 = self.w2 if x_TE.is_cuda else self.w2_packed
        if w13 is None or w2 is None:
            return self._run_unpacked(x_TE, weights_TK, ids_TK)
        if self.num_shared and ids_TK.shape[1] == self.num_chosen:
            w13, w2 = w13[: self.num_experts], w2[: self.num_experts]  # to be sorted by fewer
        out_TE = torch.empty_like(x_TE)
        moe_ops.fused_experts(
            out_TE,
            x_TE,
            w13,
            w2,
            weights_TK,
            ids_TK,
            self.inner_size,
            self.activation,
        )
        return out_TE

    def add_shared(self, out_TE: Tensor, x_TE: Tensor, gate_T1: Tensor | None) -> None:
        """Add what the shared experts give to every token, by dense products.

        Args:
            out_TE: added to in place.
            x_TE: hidden states.
            gate_T1: its sigmoids weigh what is added; None weighs nothing.
        """
        assert self.w13 is not None and self.w2 is not None
        count, first = self.num_shared, self.num_experts
        gate_up_TR = F.linear(x_TE, self.w13[first:].flatten(0, 1))
        inner_TSI = self._activate(gate_up_TR.unflatten(1, (count, -1)))
        if gate_T1 is not None:
            inner_TSI *= gate_T1.float().sigmoid().to(x_TE.dtype)[:, None]
        for inner_TI, down_EI in zip(inner_TSI.unbind(1), self.w2[first:], strict=True):
            out_TE.addmm_(inner_TI, down_EI.t())

    def _run_unpacked(self, x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        assert self.w13 is not None and self.w2 is not None
        act = _PLAIN_ACTIVATIONS[self.activation]
        total_TE = torch.zeros_like(x_TE, dtype=torch.float32)
        for expert in range(self.num_experts + self.num_shared):
            tokens, places = torch.where(ids_TK == expert)
            gate, up = F.linear(x_TE[tokens], self.w13[expert]).chunk(2, dim=-1)
            part = F.linear(act(gate) * up, self.w2[expert])
            total_TE.index_add_(0, tokens, part.float() * weights_TK[tokens, places, None])
        return total_TE.to(x_TE.dtype)


_PLAIN_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def is_built_on_gpu() -> bool:
    """Whether modules are being built on a GPU."""
    return torch.get_default_device().type == "cuda"


def _make_weight(num_experts: int, rows: int, columns: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(num_experts, rows, columns, dtype=dtype), requires_grad=False)
