"""Shared experts: many tokens are multiplied by them as few choose them, on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests._custom_ops.gpu.tensors import NEEDS_GPU, draw
from vllm._custom_ops.moe import ExpertChoice
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers import shared_experts
from vllm.model_executor.layers.fused_moe import FusedMoE

pytestmark = NEEDS_GPU
HIDDEN, INNER, NUM_EXPERTS, NUM_CHOSEN = 256, 128, 8, 2


@pytest.mark.parametrize("num_shared, has_gate", [(1, True), (2, True), (2, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [3, 300])
def test_dense_products_equal_chosen_experts(
    monkeypatch: pytest.MonkeyPatch,
    num_shared: int,
    has_gate: bool,
    dtype: torch.dtype,
    num_tokens: int,
) -> None:
    from vllm._custom_ops.triton.table import register_triton_ops

    register_triton_ops()
    with torch.device("cuda"):
        experts = FusedMoE(
            NUM_EXPERTS,
            NUM_CHOSEN,
            HIDDEN,
            INNER,
            activation="silu",
            renormalize=False,
            dtype=dtype,
            tp=TensorParallel(0, 1, None),
            shared_size=num_shared * INNER,
        )
    assert experts.num_shared == num_shared and experts.w13 is not None and experts.w2 is not None
    experts.w13.data.copy_(draw(*experts.w13.shape, dtype=dtype, seed=1, scale=HIDDEN**-0.5))
    experts.w2.data.copy_(draw(*experts.w2.shape, dtype=dtype, seed=2, scale=INNER**-0.5))
    x = draw(num_tokens, HIDDEN, dtype=dtype, seed=3)
    logits = draw(num_tokens, 16, dtype=dtype, seed=4)
    choice = ExpertChoice(
        num_experts=NUM_EXPERTS, num_shared=num_shared, has_shared_gate=has_gate, renormalize=True
    )
    if has_gate:  # one gate, once for each shared expert
        logits[:, NUM_EXPERTS : NUM_EXPERTS + num_shared] = logits[:, NUM_EXPERTS, None].clone()
    found = []
    for most in (num_tokens, num_tokens - 1):
        monkeypatch.setattr(shared_experts, "MAX_JOINED_TOKENS", most)
        found.append(shared_experts.run_with_choice(experts, x, logits, choice))
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)
