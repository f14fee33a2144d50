"""A mixture and the MLP that every token takes beside it, in fewer launches on a GPU.

Called by `models/blocks.py` and `models/deepseek_v2.py`. The MLP's gate becomes a further output of
the router and, if `FusedMoE` keeps it so, the MLP further experts of the mixture. Few tokens choose
those as they do the others: each launch that this saves costs a decode step about as much as what
it computes. Many tokens are multiplied by them as by any matrix, which torch does faster than the
mixture's kernels can.

Shapes: T tokens, E hidden size, N experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from vllm._custom_ops import moe as moe_ops
from vllm._custom_ops.moe import ExpertChoice
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.linear import Linear

_ROW_MULTIPLE = 16
"""Of the router's outputs, so that rows of logits are aligned."""

MAX_JOINED_TOKENS = 1024
"""More tokens do not choose the shared experts."""


def hold_shared(experts: FusedMoE, gate_up: Linear, down: Linear) -> None:
    """Copy the weights of the MLP that every token takes into the mixture's stacks."""
    assert gate_up.weight is not None and down.weight is not None
    experts.hold_shared(gate_up.weight.data, down.weight.data)


def append_gate(router: Linear, gate: Linear, num_shared: int) -> None:
    """Make the gate's output follow those of the router, once for each expert that it weighs.

    Args:
        router: with a weight that is not packed.
        gate: one row.
        num_shared: as how many experts the mixture keeps the MLP; 0 is none, and one gate.
    """
    assert router.weight is not None and gate.weight is not None
    gate_RE = gate.weight.data.expand(max(1, num_shared), -1)
    rows = torch.cat((router.weight.data, gate_RE))
    padding = -rows.shape[0] % _ROW_MULTIPLE
    rows = nn.functional.pad(rows, (0, 0, 0, padding))
    router.weight = nn.Parameter(rows, requires_grad=False)
    router.output_size = rows.shape[0]


def run_with_choice(
    experts: FusedMoE, x_TE: Tensor, logits_TN: Tensor, choice: ExpertChoice
) -> Tensor:
    """Return the weighted sum of each token's chosen and shared experts, [T, E].

    Args:
        experts: holds the shared ones too, if there are any.
        x_TE: hidden states.
        logits_TN: of the router, see `choose_experts`.
        choice: how experts are chosen.
    """
    is_apart = choice.num_shared > 0 and x_TE.shape[0] > MAX_JOINED_TOKENS
    own = replace(choice, num_shared=0, has_shared_gate=False) if is_apart else choice
    num_columns = experts.num_chosen + own.num_shared
    weights_TK = x_TE.new_empty(x_TE.shape[0], num_columns, dtype=torch.float32)
    ids_TK = torch.empty_like(weights_TK, dtype=torch.int32)
    moe_ops.choose_experts(weights_TK, ids_TK, logits_TN, None, own)
    out_TE = experts.run_chosen(x_TE, weights_TK, ids_TK)
    if is_apart:
        gate = choice.num_experts
        gate_T1 = logits_TN[:, gate : gate + 1] if choice.has_shared_gate else None
        experts.add_shared(out_TE, x_TE, gate_T1)
    return out_TE
