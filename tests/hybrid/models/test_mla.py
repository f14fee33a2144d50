"""Latent attention in its two forms: absorbed queries, and keys and values of every head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.hybrid.models import test_deepseek_v2
from tests.hybrid.models.tiny import make_checkpoint
from tests.utils.ops import random_rows
from tests.utils.paged import cumulative
from tests.utils.paged_driver import PagedDriver
from vllm._custom_ops.naive.attention import prompt_attention
from vllm.batch import AttentionState, ForwardBatch, GroupBatch, LayerCache
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers import mla
from vllm.model_executor.layers.latent_expansion import LatentExpansion, LatentSizes
from vllm.model_executor.models import ModelRegistry

HEADS = 3
SIZES = LatentSizes(
    hidden_size=16,
    num_heads=HEADS,
    query_rank=None,
    latent=32,
    nope=24,
    rope=8,
    value=16,
    scale=0.2,
    rope_settings={},
    bias=False,
)
LENS = [5, 1, 9]


@pytest.fixture
def expansion() -> LatentExpansion:
    made = LatentExpansion(HEADS, SIZES, dtype=torch.float32, tp=TensorParallel.single())
    assert made.weight is not None
    made.weight.data = random_rows(*made.weight.shape, dtype=torch.float32, seed=0, scale=0.3)
    return made


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    """Queries [T, H, N + R], and rows of the cache [T, 1, L + R]."""
    tokens = sum(LENS)
    asked = random_rows(tokens, HEADS, SIZES.nope + SIZES.rope, dtype=torch.float32, seed=1)
    return asked, random_rows(tokens, 1, SIZES.row, dtype=torch.float32, seed=2)


def attend_absorbed(expansion: LatentExpansion, asked: Tensor, row: Tensor) -> Tensor:
    query = torch.empty(len(asked), HEADS, SIZES.row)
    expansion.absorb_query(asked[:, :, : SIZES.nope], query[:, :, : SIZES.latent])
    query[:, :, SIZES.latent :] = asked[:, :, SIZES.nope :]
    read = torch.empty_like(query)
    prompt_attention(read, query, row, row, cumulative(LENS), max(LENS), SIZES.scale)
    return expansion.expand_value(read[:, :, : SIZES.latent])


def make_batch(slots: Tensor) -> ForwardBatch:
    """Return a step of whole prompts."""
    none = torch.zeros(0, dtype=torch.int64)
    group = GroupBatch(block_offsets=none.int().view(0, 0), slots=slots, block_tokens=16)
    return ForwardBatch(
        input_ids=none,
        positions=none,
        cu_query_lens=cumulative(LENS),
        seq_lens=torch.tensor(LENS).int(),
        logits_rows=none,
        groups=(group,),
        max_query_len=max(LENS),
        max_seq_len=max(LENS),
        num_decode_rows=0,
        new_lens_cpu=tuple(LENS),
        computed_lens_cpu=(0,) * len(LENS),
    )


def test_both_forms_are_equal(
    expansion: LatentExpansion,
    inputs: tuple[Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, row = inputs
    monkeypatch.setattr(mla, "prompt_attention", prompt_attention)
    block = SimpleNamespace(attention=SimpleNamespace(layer=0), expansion=expansion, _sizes=SIZES)
    caches = (LayerCache(group=0, tensors=(torch.empty(0),)),)
    found = mla.LatentAttentionBlock.attend_expanded(
        block,  # type: ignore[arg-type]
        asked,
        row,
        make_batch(torch.zeros(len(row), 2).int()),
        AttentionState(caches=caches, plans={}),
    )
    expected = attend_absorbed(expansion, asked, row)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_only_whole_long_prompts_are_expanded() -> None:
    batch = make_batch(torch.zeros(0, 2).int())
    count = len(LENS)
    assert mla.count_absorbed_rows(batch, SIZES) == count, "too short to pay the launches"
    long = replace(batch, new_lens_cpu=(*LENS[:-1], mla.MIN_EXPANDED_TOKENS))
    assert mla.count_absorbed_rows(long, SIZES) == 0
    cut = replace(long, computed_lens_cpu=(0, 4, *[0] * (count - 2)))
    assert mla.count_absorbed_rows(cut, SIZES) == 2
    assert mla.count_absorbed_rows(replace(long, computed_lens_cpu=(0, 0, 4)), SIZES) == count
    assert mla.count_absorbed_rows(replace(long, computed_lens_cpu=()), SIZES) == count


def test_a_step_of_both_kinds_of_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row that decodes, a prompt that goes on, and whole prompts behind them."""
    checkpoint = make_checkpoint(test_deepseek_v2.ROW, tmp_path)
    cls, _ = ModelRegistry.resolve_model_cls(checkpoint.config["architectures"])
    model = cls(checkpoint.config, dtype=torch.float32, tp=TensorParallel.single())
    model.load_weights(checkpoint.weights.items())  # not packed: as weights are on a GPU
    prompts = {n: [(7 * n + 3 * i) % 300 + 3 for i in range(40)] for n in range(4)}
    steps = {0: prompts[0][:1], 1: prompts[1][9:30], 2: prompts[2][:25], 3: prompts[3][:40]}
    found = []
    for is_expanded in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(mla, "prompt_attention", prompt_attention)
            patch.setattr(mla, "can_expand", lambda x: is_expanded)  # noqa: B023
            patch.setattr(mla, "MIN_EXPANDED_TOKENS", 16)
            driver = PagedDriver(model)
            driver.step({0: prompts[0], 1: prompts[1][:9]})
            found.append([*driver.step(steps), *driver.step({n: [5] for n in steps})])
    for absorbed, expanded in zip(*found, strict=True):
        torch.testing.assert_close(expanded, absorbed, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found[0][2], found[1][2]), "the expanded form rounds otherwise"
