"""Doors of the mixture-of-experts ops: check the arguments, then run the compiled kernel.

Called by `model_executor/layers/fused_moe.py`. Naive twins: `_custom_ops/naive/moe.py`. Expert
weights are packed by `linear.pack_linear_weight` and stacked. Nothing here computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm._custom_ops.checks import FLOATS, check_contiguous, check_like, check_rows, check_tensor
from vllm._custom_ops.library import ops
from vllm.errors import ShapeError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


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
    op = "topk_softmax"
    check_tensor(op, "gating", gating, FLOATS, (None, None))
    check_rows(op, "gating", gating)
    check_tensor(op, "weights", weights, (torch.float32,), (gating.shape[0], None))
    check_tensor(op, "indices", indices, (torch.int32,), tuple(weights.shape))
    check_contiguous(op, "weights", weights)
    check_contiguous(op, "indices", indices)
    if not 1 <= weights.shape[1] <= gating.shape[1]:
        raise ShapeError(f"{op}: k must lie in 1..{gating.shape[1]}, got {weights.shape[1]}")
    ops().topk_softmax(weights, indices, gating, renormalize)


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
        w13_packed: [E, ...], packed [2 * intermediate, hidden] of each expert, gate rows then up rows.
        w2_packed: [E, ...], packed [hidden, intermediate] of each expert.
        topk_weights: float32 [T, k].
        topk_ids: int32 [T, k], each in 0..E-1.
        intermediate_size: inner size of one expert on this rank.
        activation: "silu", "gelu" or "gelu_tanh".

    Raises:
        ShapeError: an argument has the wrong shape, stride, dtype or value.
        RuntimeError: an expert number lies outside (nothing is written then).
    """
    op = "fused_experts"
    if activation not in ACTIVATIONS:
        raise ShapeError(f"{op}: activation must be one of {ACTIVATIONS}, got {activation!r}")
    check_tensor(op, "x", x, FLOATS, (None, None))
    check_rows(op, "x", x)
    check_like(op, "out", out, "x", x)
    check_rows(op, "out", out)
    check_tensor(op, "topk_weights", topk_weights, (torch.float32,), (x.shape[0], None))
    check_tensor(op, "topk_ids", topk_ids, (torch.int32,), tuple(topk_weights.shape))
    for name, tensor in (
        ("topk_weights", topk_weights),
        ("topk_ids", topk_ids),
        ("w13_packed", w13_packed),
        ("w2_packed", w2_packed),
    ):
        check_contiguous(op, name, tensor)
    if w13_packed.shape[0] != w2_packed.shape[0]:
        raise ShapeError(
            f"{op}: w13_packed has {w13_packed.shape[0]} experts, w2_packed {w2_packed.shape[0]}"
        )
    ops().fused_experts(
        out, x, w13_packed, w2_packed, topk_weights, topk_ids, intermediate_size, activation
    )
