"""Doors of the mixture-of-experts ops.

Called by `model_executor/layers/fused_moe.py`. Naive twins: `_custom_ops/naive/moe.py`. Expert
weights are packed by `linear.pack_linear_weight` and stacked. The compiled op checks its
arguments; nothing here computes.
"""

from __future__ import annotations

from torch import Tensor

from vllm._custom_ops.library import C


def topk_softmax(weights: Tensor, indices: Tensor, gating: Tensor, renormalize: bool) -> None:
    """Choose the k most likely experts of each token: softmax in float32, then top-k.

    Args:
        weights: float32 [T, k], probabilities in falling order.
        indices: int32 [T, k], the experts they belong to; equal ones in order of their number.
        gating: float32 or bfloat16 [T, E], router logits; the last dimension is contiguous.
        renormalize: whether the k probabilities are scaled to sum to 1.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.topk_softmax(weights, indices, gating, renormalize)


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
    """Run each token through its chosen experts and add the weighted results.

    Tokens are grouped by expert; the sum of one token runs in the order of its top-k, in float32.

    Args:
        out: float32 or bfloat16 [T, hidden]; not `x`.
        x: like `out`.
        w13_packed: [E, ...], packed [2 * intermediate, hidden] of each expert, gate rows first.
        w2_packed: [E, ...], packed [hidden, intermediate] of each expert.
        topk_weights: float32 [T, k].
        topk_ids: int32 [T, k], each in 0..E-1.
        intermediate_size: inner size of one expert on this rank.
        activation: "silu", "gelu" or "gelu_tanh".

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype, or an expert number lies
            outside; nothing is written then.
    """
    C.fused_experts(
        out, x, w13_packed, w2_packed, topk_weights, topk_ids, intermediate_size, activation
    )
