"""Mixture-of-experts ops in plain PyTorch: the twins of `_custom_ops/moe.py`.

Read by tests and by anyone who wants to know what the ops mean. Never called by the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
