"""The cache ops on a GPU against their twins: slots, skipped tokens, strides, chains of copies."""

from __future__ import annotations

import pytest
import torch

from tests._custom_ops.gpu.graphs import capture
from tests._custom_ops.gpu.tensors import DTYPES, NEEDS_GPU, draw, make_caches, make_slots
from vllm._custom_ops import cache as ops
from vllm._custom_ops.naive import cache as naive
from vllm.errors import ShapeError

pytestmark = NEEDS_GPU
SHAPES = [(1, 8, 5), (3, 64, 16), (8, 128, 16), (2, 12, 4), (1, 576, 16), (3, 5, 7)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_size", "block_tokens"), SHAPES)
def test_reshape_and_cache_equals_twin(
    dtype: torch.dtype, kv_heads: int, head_size: int, block_tokens: int
) -> None:
    qkv = draw(20, 2 + 2 * kv_heads, head_size, dtype=dtype, seed=1)
    key, value = qkv[:, 2 : 2 + kv_heads], qkv[:, 2 + kv_heads :]
    row_bytes = 2 * block_tokens * kv_heads * head_size * dtype.itemsize
    slots = make_slots(20, block_tokens, row_bytes // 256 + 2)
    arenas = []
    for module in (ops, naive):
        arena, *caches = make_caches(block_tokens, kv_heads, head_size, dtype)
        module.reshape_and_cache(key, value, *caches, slots)
        arenas.append(arena)
    assert torch.equal(*arenas)


@pytest.mark.parametrize("block_bytes", [256, 700, 4096])
def test_copy_blocks_runs_in_order(block_bytes: int) -> None:
    """A block that is a target first and a source then, twice over one launch's list."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(256, (256 * 4000,), dtype=torch.uint8, generator=generator)
    blocks = 16 * torch.randint(200, (300, 2), generator=generator)
    arena = source.cuda()
    ops.copy_blocks(arena, blocks, block_bytes)
    naive.copy_blocks(source, blocks, block_bytes)
    assert torch.equal(arena.cpu(), source)
    ops.copy_blocks(arena, blocks[:0], block_bytes)


def test_graph_replays_into_new_slots() -> None:
    """A replay reads the slots that are there then; those of padding tokens write nothing."""
    arena, *caches = make_caches(4, 2, 64, torch.bfloat16)
    key, value = (draw(6, 2, 64, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    slots = make_slots(6, 4, 9)
    graph = capture(lambda: ops.reshape_and_cache(key, value, *caches, slots))
    slots[:, 0] += 20
    slots[3:, 0] = -1
    arena.fill_(255)
    graph.replay()
    expected, *expected_caches = make_caches(4, 2, 64, torch.bfloat16)
    naive.reshape_and_cache(key, value, *expected_caches, slots)
    assert torch.equal(arena, expected)


def test_bad_arguments_name_what_was_given() -> None:
    _, *caches = make_caches(4, 2, 8, torch.float32)
    key, slots = draw(2, 2, 8, dtype=torch.float32), make_slots(2, 4, 9)
    with pytest.raises(ShapeError, match="slots is Long"):
        ops.reshape_and_cache(key, key, *caches, slots.long())
    with pytest.raises(ShapeError, match="slots must be on a CUDA device"):
        ops.reshape_and_cache(key, key, *caches, slots.cpu())
    with pytest.raises(ShapeError, match="key_cache has shape"):
        ops.reshape_and_cache(key[:, :1], key[:, :1], *caches, slots)
    arena = torch.zeros(2560, dtype=torch.uint8, device="cuda")
    with pytest.raises(ShapeError, match=r"copies\[0\] names unit 9"):
        ops.copy_blocks(arena, torch.tensor([[0, 9]]), 700)
    with pytest.raises(ShapeError, match="copies must be on the CPU"):
        ops.copy_blocks(arena, torch.tensor([[0, 9]]).cuda(), 256)
