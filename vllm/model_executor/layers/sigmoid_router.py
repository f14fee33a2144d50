"""A router that scores experts one by one with a sigmoid: Nemotron-H and LFM2.

Built by the families' expert layers. A correction that was learned for balance joins the choice but
not the weights. Every rank routes alike.

Shapes: T tokens, E hidden size, N experts, k chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vllm._custom_ops import moe as moe_ops
from vllm._custom_ops.moe import ExpertChoice
from vllm.errors import ConfigError
from vllm.model_executor.layers.float_router import FloatRouter
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.state import FloatVectors


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSizes:
    """How experts are chosen.

    Attributes:
        correction: name of the correction in the checkpoint, or None.
        num_groups, num_chosen_groups: the experts of the best groups only may be chosen; a group
            counts as much as its two best experts.
        renormalize: whether the chosen scores are divided by their sum plus `epsilon`.
        scale: factor of the weights.
        is_float: whether logits are computed in float32, whatever the model's type.
    """

    num_experts: int
    num_chosen: int
    correction: str | None
    renormalize: bool
    epsilon: float
    scale: float
    num_groups: int = 1
    num_chosen_groups: int = 1
    is_float: bool = False


class SigmoidRouter(nn.Module):
    """Scores of all experts, and the k best of them."""

    def __init__(self, hidden_size: int, sizes: RouterSizes, dtype: torch.dtype) -> None:
        super().__init__()
        if sizes.num_experts % sizes.num_groups:
            raise ConfigError(
                f"the number of experts ({sizes.num_experts}) must be a multiple of n_group "
                f"({sizes.num_groups})"
            )
        self._sizes = sizes
        count = sizes.num_experts
        self.linear = (
            FloatRouter(hidden_size, count)
            if sizes.is_float
            else ReplicatedLinear(hidden_size, count, bias=False, dtype=dtype)
        )
        self.correction = (
            FloatVectors((sizes.correction,), count, 0, count) if sizes.correction else None
        )

    def forward(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights, float32 [T, k], and experts, int32 [T, k]."""
        sizes = self._sizes
        logits_TN = self.linear(x_TE)
        if logits_TN.is_cuda:
            return self._choose(logits_TN)
        logits_TN = logits_TN.float()
        # torch.sigmoid rounds an element by its place in memory; exp and division do not.
        scores_TN = 1.0 / (1.0 + torch.exp(-logits_TN))
        ids_TK = self._rank(scores_TN).topk(sizes.num_chosen, dim=-1).indices
        weights_TK = scores_TN.gather(1, ids_TK)
        if sizes.renormalize:
            total_T1 = weights_TK[:, :1].clone()
            for choice in range(1, sizes.num_chosen):  # in a fixed order
                total_T1 += weights_TK[:, choice : choice + 1]
            weights_TK = weights_TK / (total_T1 + sizes.epsilon)
        return weights_TK * sizes.scale, ids_TK.int()

    def _choose(self, logits_TN: Tensor) -> tuple[Tensor, Tensor]:
        """Choose as `forward` does, in one launch."""
        sizes = self._sizes
        weights_TK = logits_TN.new_empty(logits_TN.shape[0], sizes.num_chosen, dtype=torch.float32)
        ids_TK = torch.empty_like(weights_TK, dtype=torch.int32)
        correction_N = None
        if self.correction is not None and sizes.correction is not None:
            correction_N = self.correction.vector(sizes.correction)
        choice = ExpertChoice(
            num_experts=sizes.num_experts,
            num_groups=sizes.num_groups,
            num_chosen_groups=sizes.num_chosen_groups,
            is_sigmoid=True,
            renormalize=sizes.renormalize,
            epsilon=sizes.epsilon,
            scale=sizes.scale,
        )
        moe_ops.choose_experts(weights_TK, ids_TK, logits_TN, correction_N, choice)
        return weights_TK, ids_TK

    def _rank(self, scores_TN: Tensor) -> Tensor:
        """Return what the choice goes by: corrected scores, -inf outside of the best groups."""
        sizes = self._sizes
        if self.correction is not None and sizes.correction is not None:
            scores_TN = scores_TN + self.correction.vector(sizes.correction)
        if sizes.num_chosen_groups == sizes.num_groups:
            return scores_TN
        by_group = scores_TN.unflatten(-1, (sizes.num_groups, -1))
        best = by_group.topk(2, dim=-1).values.sum(-1).topk(sizes.num_chosen_groups, dim=-1).indices
        is_open = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=scores_TN.device)
        is_open.scatter_(1, best, True)
        return by_group.masked_fill(~is_open[..., None], float("-inf")).flatten(1)
