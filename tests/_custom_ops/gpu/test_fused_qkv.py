"""The fused op between QKV and attention: equal bit for bit to the separate ops, near its twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests._custom_ops.gpu.graphs import capture
from tests._custom_ops.gpu.tensors import (
    DTYPES,
    NEEDS_GPU,
    TOLERANCE,
    draw,
    make_caches,
    make_slots,
    make_table,
    poisoned_like,
)
from vllm._custom_ops import cache, fused_qkv, norm, rope
from vllm._custom_ops.naive import fused_qkv as naive
from vllm._custom_ops.naive.linear import sum_parts
from vllm.errors import ShapeError

pytestmark = NEEDS_GPU
HEADS, KV_HEADS, BLOCK = 5, 2, 4
SIZES = [(128, 128), (64, 64), (128, 0), (256, 64), (80, 32), (96, 12), (24, 2), (512, 512)]


def run_separate_ops(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    table: Tensor | None,
    is_neox: bool,
) -> None:
    heads = qkv.unflatten(-1, (HEADS + 2 * KV_HEADS, -1))
    query, key, value = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    for x, weight in zip((query, key), norms, strict=True):
        if weight is not None:
            norm.rms_norm(x, x, weight, 1e-6)
    if table is not None:
        rope.rotary_embedding(positions, query, key, heads.shape[-1], table, is_neox)
    cache.reshape_and_cache(key, value, key_cache, value_cache, slots)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "rot_dim"), SIZES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("weights", ["none", "same", "float", "query only"])
def test_equals_separate_ops(
    dtype: torch.dtype, head_size: int, rot_dim: int, is_neox: bool, weights: str
) -> None:
    num_tokens = 11
    qkv = draw(num_tokens, (HEADS + 2 * KV_HEADS) * head_size, dtype=dtype, seed=1)
    weight_dtype = torch.float32 if weights == "float" else dtype
    q_norm, k_norm = (draw(head_size, dtype=weight_dtype, seed=seed) for seed in (2, 3))
    norms = {"none": (None, None), "query only": (q_norm, None)}.get(weights, (q_norm, k_norm))
    table = make_table(60, rot_dim) if rot_dim else None
    positions = torch.arange(30, 30 + num_tokens).cuda()
    block_units = 2 * BLOCK * KV_HEADS * head_size * dtype.itemsize // 256 + 2
    slots = make_slots(num_tokens, BLOCK, block_units)
    found, separate, twin = (
        (qkv.clone(), make_caches(BLOCK, KV_HEADS, head_size, dtype)) for _ in range(3)
    )
    run_separate_ops(separate[0], positions, slots, *separate[1][1:], norms, table, is_neox)
    for module, (x, caches) in ((fused_qkv, found), (naive, twin)):
        module.qkv_norm_rope_cache(
            x, positions, slots, *caches[1:], *norms, 1e-6, table,
            HEADS, KV_HEADS, head_size, rot_dim, is_neox,
        )  # fmt: skip
    assert torch.equal(found[0], separate[0])
    assert torch.equal(found[1][0], separate[1][0])
    # A norm rounded the other way moves both elements of a pair by a step of the larger one.
    step = TOLERANCE[dtype][0] * twin[0].abs().max().item()
    torch.testing.assert_close(found[0], twin[0], rtol=0, atol=step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_size", "rot_dim"), [(128, 128), (128, 32), (128, 0), (96, 12)])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("weights", ["none", "float"])
def test_many_tokens_equal_separate_ops(
    dtype: torch.dtype, head_size: int, rot_dim: int, is_neox: bool, weights: str
) -> None:
    """So many that a group of lanes serves several heads."""
    num_tokens = 13001
    qkv = draw(num_tokens, (HEADS + 2 * KV_HEADS) * head_size, dtype=dtype, seed=1)
    q_norm, k_norm = (draw(head_size, dtype=torch.float32, seed=seed) for seed in (2, 3))
    norms = (None, None) if weights == "none" else (q_norm, k_norm)
    table = make_table(num_tokens, rot_dim) if rot_dim else None
    positions = torch.arange(num_tokens).cuda()
    block_units = 2 * BLOCK * KV_HEADS * head_size * dtype.itemsize // 256 + 2
    slots = make_slots(num_tokens, BLOCK, block_units)
    sizes = (BLOCK, KV_HEADS, head_size, dtype, (num_tokens // BLOCK + 2) * block_units)
    separate, separate_caches, caches = qkv.clone(), make_caches(*sizes), make_caches(*sizes)
    run_separate_ops(separate, positions, slots, *separate_caches[1:], norms, table, is_neox)
    fused_qkv.qkv_norm_rope_cache(
        qkv, positions, slots, *caches[1:], *norms, 1e-6, table,
        HEADS, KV_HEADS, head_size, rot_dim, is_neox,
    )  # fmt: skip
    assert torch.equal(qkv, separate)
    assert torch.equal(caches[0], separate_caches[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_size", "rot_dim"), [(128, 128), (128, 64), (128, 0), (128, 12), (64, 64), (96, 12)]
)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("weights", ["none", "same", "float", "query only"])
@pytest.mark.parametrize("num_parts", [1, 3, 12])
def test_parts_equal_their_rounded_sum(
    dtype: torch.dtype, head_size: int, rot_dim: int, is_neox: bool, weights: str, num_parts: int
) -> None:
    check_parts(7, num_parts, dtype, head_size, rot_dim, is_neox, weights, has_bias=True)


@pytest.mark.parametrize("num_parts", range(1, 10))
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 33, 64])
@pytest.mark.parametrize("weights", ["none", "same"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_any_number_of_parts_and_rows(
    num_parts: int, num_rows: int, weights: str, has_bias: bool
) -> None:
    check_parts(num_rows, num_parts, torch.bfloat16, 128, 128, True, weights, has_bias=has_bias)


def check_parts(
    num_rows: int,
    num_parts: int,
    dtype: torch.dtype,
    head_size: int,
    rot_dim: int,
    is_neox: bool,
    weights: str,
    *,
    has_bias: bool,
) -> None:
    """Compare with the op over the sum of the parts, bit for bit."""
    size = (HEADS + 2 * KV_HEADS) * head_size
    parts = draw(num_parts, num_rows, size, dtype=torch.float32, seed=1)
    bias = draw(size, dtype=dtype, seed=4) if has_bias else None
    weight_dtype = torch.float32 if weights == "float" else dtype
    q_norm, k_norm = (draw(head_size, dtype=weight_dtype, seed=seed) for seed in (2, 3))
    norms = {"none": (None, None), "query only": (q_norm, None)}.get(weights, (q_norm, k_norm))
    table = make_table(120, rot_dim) if rot_dim else None
    positions = torch.arange(30, 30 + num_rows).cuda()
    block_units = 2 * BLOCK * KV_HEADS * head_size * dtype.itemsize // 256 + 2
    slots = make_slots(num_rows, BLOCK, block_units, skipped=num_rows - 1)
    total = sum_parts(parts)
    qkv = (total if bias is None else total + bias.float()).to(dtype)
    found, found_caches = poisoned_like(qkv), make_caches(BLOCK, KV_HEADS, head_size, dtype)
    caches = make_caches(BLOCK, KV_HEADS, head_size, dtype)
    for x, (_, *targets), given in (
        (qkv, caches, (None, None)),
        (found, found_caches, (parts, bias)),
    ):
        fused_qkv.qkv_norm_rope_cache(
            x, positions, slots, *targets, *norms, 1e-6, table,
            HEADS, KV_HEADS, head_size, rot_dim, is_neox, *given,
        )  # fmt: skip
    assert torch.equal(found, qkv)
    assert torch.equal(found_caches[0], caches[0])


def call(qkv: Tensor, positions: Tensor, slots: Tensor, caches: list[Tensor]) -> None:
    weight = torch.ones(128, dtype=qkv.dtype, device="cuda")
    fused_qkv.qkv_norm_rope_cache(
        qkv, positions, slots, *caches, weight, weight, 1e-6, make_table(60, 128),
        HEADS, KV_HEADS, 128, 128, True,
    )  # fmt: skip


def test_graph_replays_equal() -> None:
    """A replay reads positions and slots that are there then; padding tokens write no row."""
    weight, table = torch.ones(128, dtype=torch.bfloat16, device="cuda"), make_table(60, 128)
    x = draw(8, (HEADS + 2 * KV_HEADS) * 128, dtype=torch.bfloat16, seed=4)
    static = x.clone()
    positions, slots = torch.arange(8).cuda(), make_slots(8, BLOCK, 20)
    arena, *caches = make_caches(BLOCK, KV_HEADS, 128, torch.bfloat16)

    def run(qkv: Tensor, targets: list[Tensor]) -> None:
        fused_qkv.qkv_norm_rope_cache(
            qkv, positions, slots, *targets, weight, weight, 1e-6, table,
            HEADS, KV_HEADS, 128, 128, True,
        )  # fmt: skip

    graph = capture(lambda: run(static, caches))
    static.copy_(x)
    arena.fill_(255)
    positions += 7
    slots[5:, 0] = -1
    graph.replay()
    expected, *expected_caches = make_caches(BLOCK, KV_HEADS, 128, torch.bfloat16)
    run(x, expected_caches)
    assert torch.equal(static, x)
    assert torch.equal(arena, expected)


def test_no_tokens_and_bad_arguments() -> None:
    _, *caches = make_caches(BLOCK, KV_HEADS, 128, torch.bfloat16)
    qkv = draw(3, (HEADS + 2 * KV_HEADS) * 128, dtype=torch.bfloat16)
    positions, slots = torch.arange(3).cuda(), make_slots(3, BLOCK, 20)
    call(qkv[:0], positions[:0], slots[:0], caches)
    with pytest.raises(ShapeError, match="dimension 1 must be 1152"):
        call(qkv[:, :1024], positions, slots, caches)
    with pytest.raises(ShapeError, match="positions has shape"):
        call(qkv, positions[:2], slots, caches)
    with pytest.raises(ShapeError, match="slots is Long"):
        call(qkv, positions, slots.long(), caches)
    with pytest.raises(ShapeError, match="key_cache is BFloat16, expected Float"):
        call(qkv.float(), positions, slots, caches)
    with pytest.raises(ShapeError, match="bias is added to parts"):
        fused_qkv.qkv_norm_rope_cache(
            qkv, positions, slots, *caches, None, None, 1e-6, None,
            HEADS, KV_HEADS, 128, 0, True, None, qkv[0],
        )  # fmt: skip
