"""The MLP beside a mixture gives the same as experts of the mixture that every token takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.utils.ops import random_rows
from vllm._custom_ops import moe as moe_ops
from vllm._custom_ops.naive import activation as naive_activation
from vllm._custom_ops.naive import moe as naive
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers import fused_moe, shared_experts
from vllm.model_executor.models import blocks
from vllm.model_executor.models.block_context import BlockContext
from vllm.model_executor.models.blocks import MoeBlock
from vllm.model_executor.models.deepseek_v2 import GroupedMoeBlock, GroupedMoeShape
from vllm.model_executor.models.rope_set import RopeSet
from vllm.model_executor.models.shapes import MoeShape

HIDDEN, INNER, NUM_EXPERTS = 24, 16, 6

CONTEXT = BlockContext(
    hidden_size=HIDDEN,
    norm_epsilon=1e-6,
    has_unit_offset_norm=False,
    has_post_norms=False,
    dtype=torch.float32,
    cache_dtype=None,
    tp=TensorParallel(0, 1, None),
    ropes=RopeSet(max_positions=8, max_model_len=8),
)


def fill(block: nn.Module) -> None:
    """Fill the weights by their names, those of a mixture's own experts alone."""
    for place, (_, weight) in enumerate(sorted(block.named_parameters())):
        shape = weight.shape if weight.dim() == 2 else (NUM_EXPERTS, *weight.shape[1:])
        values = random_rows(*shape, dtype=torch.float32, seed=place, scale=0.3)
        weight.data.fill_(float("nan"))
        (weight.data if weight.dim() == 2 else weight.data[:NUM_EXPERTS]).copy_(values)


def make_qwen(num_shared: int, has_gate: bool) -> MoeBlock:
    shape = MoeShape(
        num_experts=NUM_EXPERTS,
        num_chosen=2,
        intermediate_size=INNER,
        activation="silu",
        renormalize=True,
        shared_size=num_shared * INNER,
        has_shared_gate=has_gate,
    )
    return MoeBlock(shape, CONTEXT)


def make_deepseek(num_shared: int, has_gate: bool) -> GroupedMoeBlock:
    assert not has_gate
    shape = GroupedMoeShape(
        num_experts=NUM_EXPERTS,
        num_chosen=2,
        num_groups=3,
        num_chosen_groups=2,
        intermediate_size=INNER,
        shared_size=num_shared * INNER,
        activation="silu",
        weight_scale=2.5,
    )
    return GroupedMoeBlock(shape, CONTEXT)


def play_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build blocks as on a GPU, whose own ops are played by their twins."""
    for module in (fused_moe, blocks):
        monkeypatch.setattr(module, "is_built_on_gpu", lambda: True)
    monkeypatch.setattr(moe_ops, "choose_experts", naive.choose_experts)
    monkeypatch.setattr(blocks, "add_gated", naive_activation.add_gated)


@pytest.mark.parametrize("max_joined", [7, 6])
@pytest.mark.parametrize(
    ("make", "num_shared", "has_gate"),
    [(make_qwen, 1, True), (make_qwen, 2, True), (make_qwen, 2, False), (make_deepseek, 2, False)],
)
def test_shared_experts_equal_the_mlp(
    monkeypatch: pytest.MonkeyPatch, make: type, num_shared: int, has_gate: bool, max_joined: int
) -> None:
    """Few tokens choose them, more are multiplied by them."""
    x = random_rows(7, HIDDEN, dtype=torch.float32, seed=50)
    apart = make(num_shared, has_gate)
    fill(apart)
    expected = apart(x)
    play_gpu(monkeypatch)
    monkeypatch.setattr(shared_experts, "MAX_JOINED_TOKENS", max_joined)
    block = make(num_shared, has_gate)
    fill(block)
    block.pack()
    assert block.experts.num_shared == num_shared and block.shared is None
    torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-6)


def test_gate_is_an_output_of_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_rows(7, HIDDEN, dtype=torch.float32, seed=50)
    apart = make_qwen(1, True)
    fill(apart)
    expected = apart(x)
    play_gpu(monkeypatch)
    monkeypatch.setattr(fused_moe, "MAX_SHARED", 0)
    block = make_qwen(1, True)
    fill(block)
    block.pack()
    assert block.shared is not None and block.shared_gate is None
    torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-6)
