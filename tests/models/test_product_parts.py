"""Products that stay in parts until the next op adds them up: the same logits, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.models.compare import make_prompts
from tests.models.families import load_ours, randomize, read_config
from tests.utils.fixtures_models import build_model
from tests.utils.paged_driver import Generated, PagedDriver
from tests.utils.product_parts import finish_product, leave_parts
from vllm._custom_ops.naive import linear as naive_linear
from vllm._custom_ops.naive import norm as naive_norm
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.parts import ProductParts
from vllm.model_executor.models.block_context import BlockContext
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.delta import Delta, add_and_norm
from vllm.model_executor.models.rope_set import RopeSet

NUM_PARTS = 3
BASE = {
    "vocab_size": 320,
    "hidden_size": 1536,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
}
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "llama": ("llama", {}, (6, 3)),
    "llama_biased": ("llama", {"attention_bias": True, "mlp_bias": True}, (0, 3)),
    "llama_small_heads": ("llama", {"head_dim": 64}, (6, 0)),
    "llama_odd_hidden": ("llama", {"hidden_size": 1288}, (0, 3)),
    "qwen2": ("qwen2", {"num_attention_heads": 12, "num_key_value_heads": 2}, (6, 3)),
    "qwen3": ("qwen3", {}, (6, 3)),
    "gemma": ("gemma", {}, (6, 3)),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 128}, (0, 3)),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
        (3, 3),
    ),
}
"""Of each: transformers' name, the config, and how often a step gives parts to norms and heads."""


@cache
def make_checkpoint(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    model_type, config, _ = FAMILIES[name]
    model = randomize(build_model(model_type, {**BASE, **config}))
    return read_config(model), dict(model.state_dict())


def load(name: str) -> CausalLM:
    config, weights = make_checkpoint(name)
    return load_ours(config, weights, dtype=torch.bfloat16, is_fused=False)


def generate(name: str) -> list[Generated]:
    """Answer prompts in chunks: steps of 77 rows, which are whole, and of fewer."""
    return PagedDriver(load(name)).generate(make_prompts((1, 16, 70)), 6, chunk_tokens=60)


@pytest.mark.parametrize("name", FAMILIES)
def test_same_logits_as_of_whole_products(name: str) -> None:
    with leave_parts(NUM_PARTS, finish=False) as found:
        in_parts = generate(name)
    with leave_parts(NUM_PARTS, finish=True) as none:
        whole = generate(name)
    assert not none
    of_norms, of_heads = FAMILIES[name][2]
    num_steps = found["qkv"] // of_heads if of_heads else found["norm"] // of_norms
    assert num_steps >= 5
    assert found == +type(found)(norm=num_steps * of_norms, qkv=num_steps * of_heads)
    for one, other in zip(in_parts, whole, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))


@pytest.mark.parametrize("name", ["llama", "qwen2_moe"])
@pytest.mark.parametrize("lens", [(100, 1, 30), (5, 7)])
def test_same_logits_where_tokens_are_left_out(name: str, lens: tuple[int, ...]) -> None:
    """Behind the last mixer, steps of any size have few rows."""
    prompts = dict(enumerate(make_prompts(lens)))
    found = []
    for finish in (False, True):
        with leave_parts(NUM_PARTS, finish=finish) as counts:
            driver = PagedDriver(load(name))
            found.append(torch.stack(driver.step(prompts, keeps_rows=True)))
            assert (counts["norm"] > 0) == (not finish)
    assert torch.equal(*found)


def test_near_the_logits_of_packed_weights() -> None:
    prompts = dict(enumerate(make_prompts((20, 7))))
    with leave_parts(NUM_PARTS, finish=False):
        in_parts = torch.stack(PagedDriver(load("qwen3")).step(prompts))
    expected = torch.stack(PagedDriver(load("qwen3")).step(prompts))
    scale = expected.abs().max().item()
    torch.testing.assert_close(in_parts, expected, rtol=0, atol=0.03 * scale)


CONTEXT = BlockContext(
    hidden_size=2048,
    norm_epsilon=1e-6,
    has_unit_offset_norm=False,
    has_post_norms=False,
    dtype=torch.bfloat16,
    cache_dtype=None,
    tp=TensorParallel.single(),
    ropes=RopeSet(max_positions=8, max_model_len=8),
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"dtype": torch.float16, "hidden_size": 4096}, True),
        ({"has_unit_offset_norm": True}, True),
        ({"dtype": torch.float32}, False),
        ({"hidden_size": 1024}, False),
        ({"hidden_size": 2880}, False),
        ({"hidden_size": 8192}, False),
        ({"has_post_norms": True}, False),
        ({"residual_scale": 0.5}, False),
    ],
)
def test_which_norms_take_parts(changes: dict[str, Any], expected: bool) -> None:
    assert replace(CONTEXT, **changes).takes_parts is expected


@pytest.mark.parametrize(
    ("num_ranks", "bias", "expected"), [(1, False, True), (1, True, False), (2, False, False)]
)
def test_sums_over_ranks_and_biases_are_left_to_nobody(
    num_ranks: int, bias: bool, expected: bool
) -> None:
    communicator = None if num_ranks == 1 else object()
    tp = TensorParallel(0, num_ranks, communicator)  # type: ignore[arg-type]
    with leave_parts(NUM_PARTS, finish=False):
        layer = RowParallelLinear(64, 32, bias=bias, dtype=torch.bfloat16, tp=tp, leaves_parts=True)
        assert layer._leaves_parts is expected
        if not expected:
            return
        layer.parameter("weight").normal_(generator=torch.Generator().manual_seed(1))
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
        product = layer.contribute(x, torch.tensor([2, 0]))
        assert isinstance(product, ProductParts)
        assert product.parts_PTN.shape == (NUM_PARTS, 2, 32)
        assert isinstance(layer(x), torch.Tensor)
        assert isinstance(layer.contribute(x, torch.tensor([], dtype=torch.int64)), torch.Tensor)


def test_parts_are_added_in_their_order_and_rounded_once() -> None:
    parts = torch.randn(4, 5, 64, generator=torch.Generator().manual_seed(3))
    product = ProductParts(parts_PTN=parts, bias_N=None, dtype=torch.bfloat16)
    residual, out = torch.zeros(2, 5, 64, dtype=torch.bfloat16)
    naive_norm.add_parts_rms_norm(out, parts, residual, torch.ones(64).bfloat16(), 1e-6)
    expected = (parts[0] + parts[1] + parts[2] + parts[3]).bfloat16()
    assert torch.equal(residual, expected)
    assert torch.equal(finish_product(product), expected)
    assert product.new_empty().shape == (5, 64)


def test_parts_are_left_to_nobody_but_norms_of_the_stream() -> None:
    parts = ProductParts(parts_PTN=torch.ones(2, 3, 64), bias_N=None, dtype=torch.bfloat16)
    residual, norm = torch.zeros(3, 64), RMSNorm(64, 1e-6, torch.float32)
    with pytest.raises(AssertionError, match="parts are left to norms"):
        Delta(x_TE=parts, norm=None).finish()
    with pytest.raises(AssertionError, match="parts are left to norms"):
        add_and_norm(norm, Delta(x_TE=parts, norm=norm), residual)


def test_the_twin_splits_any_k() -> None:
    x, weight = torch.randn(3, 50), torch.randn(8, 50)
    parts = torch.empty(4, 3, 8)
    naive_linear.skinny_linear_parts(parts, x, weight)
    torch.testing.assert_close(parts.sum(0), x @ weight.T)
