"""Mixture-of-experts ops in plain PyTorch: the twins of `_custom_ops/moe.py`.

Read by tests and by anyone who wants to know what the ops mean. Never called by the engine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm._custom_ops.moe import ExpertChoice
from vllm._custom_ops.naive import activation as activations
from vllm._custom_ops.naive.linear import unpack_linear_weight


def topk_softmax(weights: Tensor, indices: Tensor, gating: Tensor, renormalize: bool) -> None:
    """Softmax over experts in float32, then the k most likely; ties go to the lower expert."""
    probabilities = torch.softmax(gating.float(), -1)
    order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    k = weights.shape[1]
    chosen = order.values[:, :k]
    if renormalize:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    weights.copy_(chosen)
    indices.copy_(order.indices[:, :k])


def choose_experts(
    weights: Tensor,
    indices: Tensor,
    logits: Tensor,
    correction: Tensor | None,
    choice: ExpertChoice,
) -> None:
    """Score, rank, leave the worse groups out, take the k best; ties go to the lower number."""
    k = weights.shape[1] - choice.num_shared
    scores = logits[:, : choice.num_experts].float()
    scores = torch.sigmoid(scores) if choice.is_sigmoid else torch.softmax(scores, -1)
    ranks = scores if correction is None else scores + correction
    groups = ranks.unflatten(-1, (choice.num_groups, -1))
    num_best = min(2 if choice.is_sigmoid else 1, groups.shape[-1])
    best = groups.topk(num_best, dim=-1).values.sum(-1)
    order = torch.sort(best, dim=-1, descending=True, stable=True).indices
    is_open = torch.zeros_like(best, dtype=torch.bool)
    is_open.scatter_(1, order[:, : choice.num_chosen_groups], True)
    ranks = groups.masked_fill(~is_open[:, :, None], float("-inf")).flatten(1)
    chosen = torch.sort(ranks, dim=-1, descending=True, stable=True).indices[:, :k]
    found = scores.gather(1, chosen)
    if choice.renormalize:
        found = found / (found.sum(-1, keepdim=True) + choice.epsilon)
    weights[:, :k] = found * choice.scale
    indices[:, :k] = chosen
    last = choice.num_experts + choice.num_shared
    indices[:, k:] = torch.arange(choice.num_experts, last)
    weights[:, k:] = 1.0
    if choice.has_shared_gate:
        gates = torch.sigmoid(logits[:, choice.num_experts : last].float())
        weights[:, k:] = gates.to(logits.dtype).float()


def fused_experts(
    out: Tensor,
    x: Tensor,
    w13_packed: Tensor,
    w2_packed: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    intermediate_size: int,
    activation: str,
) -> None:
    """Run each token through its experts and add the results, in the order of its top-k."""
    act = getattr(activations, f"{activation}_and_mul")
    hidden_size = x.shape[1]
    for token in range(x.shape[0]):
        total = torch.zeros(hidden_size)
        for weight, expert in zip(topk_weights[token], topk_ids[token].tolist(), strict=True):
            w13 = unpack_linear_weight(w13_packed[expert], 2 * intermediate_size, hidden_size)
            w2 = unpack_linear_weight(w2_packed[expert], hidden_size, intermediate_size)
            gate_up = (x[token].float() @ w13.float().T).to(x.dtype)
            inner = torch.empty(intermediate_size, dtype=x.dtype)
            act(inner, gate_up)
            total += weight * (inner.float() @ w2.float().T).to(x.dtype).float()
        out[token] = total.to(out.dtype)


def fused_biased_experts(
    out: Tensor,
    x: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    alpha: float,
    limit: float,
) -> None:
    """Experts with biases, clamped; gate and up rows alternate."""

    def run(row: Tensor, expert: int) -> Tensor:
        inner = gate_up[expert].float() @ row.float() + gate_up_bias[expert].float()
        gate, up = inner.to(x.dtype).float().unflatten(0, (-1, 2)).unbind(1)
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        hidden = ((up + 1.0) * gate * torch.sigmoid(alpha * gate)).to(x.dtype)
        result = down[expert].float() @ hidden.float()
        return result if down_bias is None else result + down_bias[expert].float()

    _sum_experts(out, x, run, topk_weights, topk_ids)


def fused_relu2_experts(
    out: Tensor, x: Tensor, up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor
) -> None:
    """Experts of two matrices with a squared ReLU between them."""

    def run(row: Tensor, expert: int) -> Tensor:
        inner = (up[expert].float() @ row.float()).to(x.dtype)
        return down[expert].float() @ torch.relu(inner).square().float()

    _sum_experts(out, x, run, topk_weights, topk_ids)


def _sum_experts(
    out: Tensor,
    x: Tensor,
    run: Callable[[Tensor, int], Tensor],
    topk_weights: Tensor,
    topk_ids: Tensor,
) -> None:
    for token in range(x.shape[0]):
        total = torch.zeros(x.shape[1], device=x.device)
        for weight, expert in zip(topk_weights[token], topk_ids[token].tolist(), strict=True):
            total += weight * run(x[token], expert).to(x.dtype).float()
        out[token] = total.to(out.dtype)
