"""Lowered layers give the bits of single ops, in every phase; what cannot be lowered is not."""

from __future__ import annotations

import pytest
import torch

from tests.models.compare import make_prompts
from tests.models.conftest import CheckpointSet
from tests.models.families import FAMILIES, load_ours
from tests.utils.paged_driver import PagedDriver
from vllm.model_executor.models.blocks import DecoderBlock
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.fused_run import FusedRun


def list_runs(model: CausalLM) -> list[tuple[int, ...]]:
    """Return the layers of each stage, () for a block that is not lowered."""
    return [stage.layers if isinstance(stage, FusedRun) else () for stage in model.plan_stages()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_fused_equals_composed(name: str, dtype: torch.dtype, checkpoints: CheckpointSet) -> None:
    made = checkpoints.get(name)
    prompts = make_prompts((1, 16, 70))
    results = []
    for is_fused in (True, False):
        model = load_ours(made.config, made.weights, dtype=dtype, is_fused=is_fused)
        driver = PagedDriver(model, kernel="cpu")
        results.append(driver.generate(prompts, 10, chunk_tokens=33))
        assert any(list_runs(model)) == (is_fused and name not in ("mixtral", "qwen2_moe_window"))
    for fused, composed in zip(*results, strict=True):
        assert fused.token_ids == composed.token_ids
        assert torch.equal(torch.stack(fused.logits), torch.stack(composed.logits))


def test_runs_are_as_long_as_kernels_and_experts_allow(checkpoints: CheckpointSet) -> None:
    dense = checkpoints.get("gemma3")
    model = load_ours(dense.config, dense.weights)
    assert list_runs(model) == [(), (), (), ()], "no kernel is bound yet"
    PagedDriver(model, kernel="cpu")
    assert list_runs(model) == [(0, 1, 2, 3)]
    model.attention_layers()[1].bind("torch")
    assert list_runs(model) == [(0,), (), (2, 3)]
    assert isinstance(model.plan_stages()[1], DecoderBlock)

    sparse = checkpoints.get("qwen2_moe")  # layer 1 is; 3 is in mlp_only_layers
    model = load_ours(sparse.config, sparse.weights)
    PagedDriver(model, kernel="cpu")
    assert list_runs(model) == [(0,), (), (2, 3)]


def test_a_run_follows_the_caches_it_is_given(checkpoints: CheckpointSet) -> None:
    """Two drivers over one model: each has its own cache."""
    made = checkpoints.get("llama")
    model = load_ours(made.config, made.weights)
    prompt = make_prompts((30,))[0]
    one, other = (PagedDriver(model, kernel="cpu", seed=seed) for seed in (0, 1))
    (expected,) = one.step({0: prompt})
    for driver in (other, one, other):
        driver.step({5: prompt[:20]})
        (logits,) = driver.step({5: prompt[20:]})
        assert torch.equal(logits, expected)
        driver.free(5)
