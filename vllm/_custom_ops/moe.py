"""Doors of the mixture-of-experts ops.

Called by `model_executor/layers/`: `fused_moe.py`, `shared_experts.py`, `sigmoid_router.py`,
`biased_experts.py`, `relu2_experts.py`. Naive twins: `_custom_ops/naive/moe.py`. On a CPU expert
weights are packed by `linear.pack_linear_weight` and stacked, on a GPU the stacks are plain. The
ops check their arguments; nothing here computes.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChoice:
    """How the experts of a token are chosen by its logits.

    Attributes:
        num_experts: experts to choose among, the first columns of the logits.
        num_groups, num_chosen_groups: groups of neighbouring experts of the same size, at most 32,
            and how many of them a token may use. A group counts as much as its best expert, with
            sigmoids as its two best together.
        num_shared: experts that every token takes beside the chosen ones; their numbers follow.
        has_shared_gate: whether these weigh the sigmoid of their own logit, rounded; else 1.
        is_sigmoid: whether an expert is scored by itself, not by a softmax over all.
        renormalize: whether the chosen scores are divided by their sum plus `epsilon`.
        scale: factor of the chosen experts' weights.
    """

    num_experts: int
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_shared: int = 0
    has_shared_gate: bool = False
    is_sigmoid: bool = False
    renormalize: bool = False
    epsilon: float = 0.0
    scale: float = 1.0


def choose_experts(
    weights: Tensor,
    indices: Tensor,
    logits: Tensor,
    correction: Tensor | None,
    choice: ExpertChoice,
) -> None:
    """Choose the best experts of each token's best groups; CUDA tensors only.

    Args:
        weights: float32 [T, k + num_shared], best first; scores are computed in float32.
        indices: int32 [T, k + num_shared]; equal ones in order of their number.
        logits: float32, bfloat16 or float16 [T, at least num_experts], and num_shared more if they
            have gates; the last dimension is contiguous.
        correction: float32 [num_experts] or None; joins the choice but not the weights.
        choice: how to choose.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.choose_experts(
        weights,
        indices,
        logits,
        correction,
        choice.num_experts,
        choice.num_groups,
        choice.num_chosen_groups,
        choice.num_shared,
        choice.has_shared_gate,
        choice.is_sigmoid,
        choice.renormalize,
        choice.epsilon,
        choice.scale,
    )


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
        w13_packed: [E, ...], packed [2 * intermediate, hidden] of each expert, gate rows first;
            on a GPU plain, contiguous.
        w2_packed: [E, ...], packed [hidden, intermediate] of each expert; on a GPU plain.
        topk_weights: float32 [T, k].
        topk_ids: int32 [T, k], each in 0..E-1; on a GPU others count for nothing.
        intermediate_size: inner size of one expert on this rank.
        activation: "silu", "gelu" or "gelu_tanh".

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype, or an expert number lies
            outside; nothing is written then.
    """
    C.fused_experts(
        out, x, w13_packed, w2_packed, topk_weights, topk_ids, intermediate_size, activation
    )


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
    """Run each token through its chosen experts, as gpt-oss has them.

    An expert is down((up + 1) * gate * sigmoid(alpha * gate)), gate at most `limit`, up within plus
    and minus `limit`; its two products are rounded. Sums as in `fused_experts`.

    Args:
        out: float32 or bfloat16 [T, hidden]; not `x`.
        x: like `out`.
        gate_up: [E, ...], packed [2 * intermediate, hidden] of each expert, rows gate 0, up 0,
            gate 1, up 1 ...; on a GPU plain, contiguous.
        gate_up_bias: [E, 2 * intermediate].
        down: [E, ...], packed [hidden, intermediate] of each expert; on a GPU plain.
        down_bias: [E, hidden], or None where another rank adds it.
        topk_weights: float32 [T, k].
        topk_ids: int32 [T, k], each in 0..E-1; on a GPU others count for nothing.
        alpha: slope of the gate's sigmoid.
        limit: bound of gate and up.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype, or an expert number lies
            outside; nothing is written then.
    """
    C.fused_biased_experts(
        out, x, gate_up, gate_up_bias, down, down_bias, topk_weights, topk_ids, alpha, limit
    )


def fused_relu2_experts(
    out: Tensor, x: Tensor, up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor
) -> None:
    """Run each token through its chosen experts, down(relu(up(x)) ** 2).

    Both products and the square are rounded. Sums as in `fused_experts`.

    Args:
        out: float32 or bfloat16 [T, hidden]; not `x`.
        x: like `out`.
        up: [E, ...], packed [intermediate, hidden] of each expert; on a GPU plain, contiguous.
        down: [E, ...], packed [hidden, intermediate] of each expert; on a GPU plain.
        topk_weights: float32 [T, k].
        topk_ids: int32 [T, k], each in 0..E-1; on a GPU others count for nothing.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype, or an expert number lies
            outside; nothing is written then.
    """
    C.fused_relu2_experts(out, x, up, down, topk_weights, topk_ids)
