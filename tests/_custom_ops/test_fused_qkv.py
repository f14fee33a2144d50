"""The twin of the fused op between QKV and attention is the composition of the separate ops."""

from __future__ import annotations

import pytest
import torch

from tests.utils.ops import FLOAT_DTYPES, assert_near, random_rows
from tests.utils.paged import make_paged_cache
from vllm._custom_ops import cache, norm, rope
from vllm._custom_ops.naive import fused_qkv as naive

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 16, 4


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("rot_dim", [0, 8, 16])
def test_twin_equals_separate_ops(dtype: torch.dtype, has_norm: bool, rot_dim: int) -> None:
    qkv = random_rows(9, (HEADS + 2 * KV_HEADS) * SIZE, dtype=dtype, seed=1)
    weights = [random_rows(SIZE, dtype=dtype, seed=seed) for seed in (2, 3)] if has_norm else []
    table = random_rows(20, rot_dim, dtype=torch.float32, seed=4) if rot_dim else None
    positions = torch.arange(5, 14)
    caches = [make_paged_cache([9], KV_HEADS, SIZE, BLOCK, dtype) for _ in range(2)]
    slots = caches[0].slots(0, 0, 9)
    slots[2, 0] = -1

    composed = qkv.clone()
    heads = composed.unflatten(-1, (-1, SIZE))
    query, key, value = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    for x, weight in zip((query, key), weights, strict=False):
        norm.rms_norm(x, x, weight, 1e-6)
    if table is not None:
        rope.rotary_embedding(positions, query, key, SIZE, table, True)
    cache.reshape_and_cache(key, value, caches[0].key, caches[0].value, slots)

    q_norm, k_norm = weights or (None, None)
    naive.qkv_norm_rope_cache(
        qkv, positions, slots, caches[1].key, caches[1].value, q_norm, k_norm, 1e-6, table,
        HEADS, KV_HEADS, SIZE, rot_dim, True,
    )  # fmt: skip
    assert_near(qkv, composed)
    for field in ("key", "value"):
        assert_near(getattr(caches[1], field), getattr(caches[0], field))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_twin_begins_with_the_sum_of_parts(dtype: torch.dtype, has_bias: bool) -> None:
    width = (HEADS + 2 * KV_HEADS) * SIZE
    parts = random_rows(3, 9, width, dtype=torch.float32, seed=1)
    bias = random_rows(width, dtype=dtype, seed=2) if has_bias else None
    qkv = ((parts[0] + parts[1] + parts[2]) + (bias.float() if bias is not None else 0.0)).to(dtype)
    found = torch.full_like(qkv, torch.nan)
    caches = [make_paged_cache([9], KV_HEADS, SIZE, BLOCK, dtype) for _ in range(2)]
    for x, cache_of_x, given in ((qkv, caches[0], ()), (found, caches[1], (parts, bias))):
        naive.qkv_norm_rope_cache(
            x, torch.arange(9), caches[0].slots(0, 0, 9), cache_of_x.key, cache_of_x.value,
            None, None, 1e-6, None, HEADS, KV_HEADS, SIZE, 0, True, *given,
        )  # fmt: skip
    assert torch.equal(found, qkv)
    for field in ("key", "value"):
        assert_near(getattr(caches[1], field), getattr(caches[0], field))
