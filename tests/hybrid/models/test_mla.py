"""Latent attention in its two forms: absorbed queries, and keys and values of every head."""

from __future__ import annotations

import random
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
from vllm._custom_ops.naive.latent import join_latents
from vllm.attention.backends.long_prompts import MAX_JOINED_BYTES
from vllm.batch import AttentionState, ForwardBatch, GroupBatch
from vllm.cache_spec import Window
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers import latent_rows, mla
from vllm.model_executor.layers.latent_expansion import LatentExpansion, LatentSizes
from vllm.model_executor.layers.latent_rows import LatentRows
from vllm.model_executor.models import ModelRegistry
from vllm.types import DType

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
    out = torch.empty(len(asked), HEADS, SIZES.value)
    expansion.expand_value(read[:, :, : SIZES.latent], out)
    return out


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
    block = SimpleNamespace(expansion=expansion, _sizes=SIZES)
    state = AttentionState(caches=(), plans={})
    batch = make_batch(torch.zeros(len(row), 2).int())
    found = torch.full((len(row), HEADS, SIZES.value), torch.nan)
    rows = LatentRows(absorbed=None, state=state, expanded=batch, keys=None)
    mla.LatentAttentionBlock.attend_expanded(
        block,  # type: ignore[arg-type]
        found,
        asked,
        row,
        rows,
        state,
    )
    expected = attend_absorbed(expansion, asked, row)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_rows_with_many_new_tokens_are_expanded() -> None:
    batch = make_batch(torch.zeros(0, 2).int())
    count = len(LENS)
    assert latent_rows.count_absorbed_rows(batch, SIZES) == count, "too short to pay the launches"
    long = replace(batch, new_lens_cpu=(*LENS[:-1], latent_rows.MIN_EXPANDED_TOKENS))
    assert latent_rows.count_absorbed_rows(long, SIZES) == 0
    cut = replace(long, computed_lens_cpu=(0, 4, *[0] * (count - 2)))
    assert latent_rows.count_absorbed_rows(cut, SIZES) == 2
    more = replace(long, computed_lens_cpu=(0, 0, 4))
    assert latent_rows.count_absorbed_rows(more, SIZES) == 0
    much = replace(long, computed_lens_cpu=(0, 0, latent_rows.MAX_EXPANDED_KEYS))
    assert latent_rows.count_absorbed_rows(much, SIZES) == count
    assert latent_rows.count_absorbed_rows(replace(long, computed_lens_cpu=()), SIZES) == count


def test_expanded_rows_are_counted_before_the_cache_is_laid_out(expansion: LatentExpansion) -> None:
    """As many as a step may expand, and what lies beside the cache for one layer."""
    rng = random.Random(0)
    most, num_tokens = 0, 8192
    batch = make_batch(torch.zeros(0, 2).int())
    for _ in range(2000):
        new, computed = [], []
        while sum(new) < num_tokens - 1:
            new.append(min(rng.choice((100, 200, 2000)), num_tokens - sum(new)))
            computed.append(rng.choice((0, 0, 900, 9000)))
        step = replace(
            batch,
            new_lens_cpu=tuple(new),
            computed_lens_cpu=tuple(computed),
            seq_lens=torch.zeros(len(new)),
        )
        first = latent_rows.count_absorbed_rows(step, SIZES)
        if any(computed[first:]):
            most = max(most, sum(new[first:]) + sum(computed[first:]))
    num_keys = latent_rows.count_expanded_keys(num_tokens)
    assert latent_rows.MAX_EXPANDED_KEYS < most <= num_keys
    row = torch.zeros(9, SIZES.row)
    held_bytes = row.nbytes + sum(x.untyped_storage().nbytes() for x in expansion.expand_rows(row))
    layer = mla.LatentAttention(0, HEADS, SIZES, dtype=DType.FLOAT32, cache_dtype=None)
    assert layer.count_scratch_bytes(9, num_tokens) == held_bytes
    assert layer.count_scratch_bytes(num_keys, num_tokens) == held_bytes // 9 * num_keys
    assert layer.count_scratch_bytes(num_keys + 1, num_tokens) == held_bytes // 9 * num_keys
    assert layer.count_scratch_bytes(1 << 30, num_tokens) == MAX_JOINED_BYTES, "or as latents"


@pytest.mark.parametrize("max_chunk", [4, 64])
def test_a_step_of_both_kinds_of_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, max_chunk: int
) -> None:
    """A row that decodes, a prompt that goes on, and whole prompts behind them."""
    checkpoint = make_checkpoint(test_deepseek_v2.ROW, tmp_path)
    cls, _ = ModelRegistry.resolve_model_cls(checkpoint.config["architectures"])
    model = cls(checkpoint.config, dtype=torch.float32, tp=TensorParallel.single())
    model.load_weights(checkpoint.weights.items())  # not packed: as weights are on a GPU
    prompts = {n: [(7 * n + 3 * i) % 300 + 3 for i in range(40)] for n in range(4)}
    steps = {0: prompts[0][:1], 1: prompts[1][9:30], 2: prompts[2][:25], 3: prompts[3][:40]}
    found: list[list[Tensor]] = []
    joined: list[tuple[object, ...]] = []
    for is_expanded in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(mla, "prompt_attention", prompt_attention)
            patch.setattr(mla, "join_latents", lambda *a: (joined.append(a), join_latents(*a)))
            patch.setattr(mla, "can_expand", lambda x: is_expanded)  # noqa: B023
            patch.setattr(latent_rows, "MIN_EXPANDED_TOKENS", 16)
            patch.setattr(latent_rows, "MAX_CHUNK_TOKENS", max_chunk)
            driver = PagedDriver(model)
            driver.step({0: prompts[0], 1: prompts[1][:9]})
            found.append([*driver.step(steps), *driver.step({n: [5] for n in steps})])
    for absorbed, expanded in zip(*found, strict=True):
        torch.testing.assert_close(expanded, absorbed, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found[0][2], found[1][2]), "the expanded form rounds otherwise"
    assert bool(joined) == (max_chunk == 4), "a prompt that goes on by more is expanded too"


def test_layers_that_see_less_are_never_expanded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a policy of the fork may want it of some layers."""
    checkpoint = make_checkpoint(test_deepseek_v2.ROW, tmp_path)
    cls, _ = ModelRegistry.resolve_model_cls(checkpoint.config["architectures"])
    model = cls(checkpoint.config, dtype=torch.float32, tp=TensorParallel.single())
    model.load_weights(checkpoint.weights.items())
    for layer in model.attention_layers().values():
        layer.limit(Window(tokens=8), "window", None)
    monkeypatch.setattr(latent_rows, "MIN_EXPANDED_TOKENS", 16)
    prompt = [(3 * i) % 300 + 3 for i in range(40)]
    expected = PagedDriver(model).step({0: prompt}, all_logits=True)[0]
    monkeypatch.setattr(mla, "can_expand", lambda x: True)
    assert torch.equal(PagedDriver(model).step({0: prompt}, all_logits=True)[0], expected)
