"""The cache ops against their twins: slots, skipped tokens, strided sources, block copies."""

from __future__ import annotations

import pytest
import torch

from tests.utils.ops import FLOAT_DTYPES, random_rows
from tests.utils.paged import make_paged_cache
from vllm._custom_ops import cache as ops
from vllm._custom_ops.naive import cache as naive
from vllm.errors import ShapeError


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_size", "block_tokens"), [(1, 8, 5), (3, 64, 16)])
def test_reshape_and_cache_equals_twin(
    dtype: torch.dtype, kv_heads: int, head_size: int, block_tokens: int
) -> None:
    caches = [
        make_paged_cache([40, 13], kv_heads, head_size, block_tokens, dtype) for _ in range(2)
    ]
    qkv = random_rows(20, 2 + 2 * kv_heads, head_size, dtype=dtype, seed=1)
    key, value = qkv[:, 2 : 2 + kv_heads], qkv[:, 2 + kv_heads :]
    slots = torch.cat((caches[0].slots(0, 17, 30), caches[0].slots(1, 6, 13)))
    slots[4, 0] = -1
    for module, cache in zip((ops, naive), caches, strict=True):
        module.reshape_and_cache(key, value, cache.key, cache.value, slots)
    for field in ("key", "value"):
        actual, expected = (getattr(cache, field) for cache in caches)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        assert actual.isnan().any()


def test_copy_blocks_equals_twin() -> None:
    arenas = [torch.arange(256 * 40).to(torch.uint8) for _ in range(2)]
    copies = torch.tensor([[0, 9], [9, 30], [12, 3]])
    ops.copy_blocks(arenas[0], copies, 700)
    naive.copy_blocks(arenas[1], copies, 700)
    assert torch.equal(arenas[0], arenas[1])
    ops.copy_blocks(arenas[0], copies[:0], 700)


def test_bad_arguments_name_what_was_given() -> None:
    cache = make_paged_cache([8], 2, 8, 4, torch.float32)
    key = torch.zeros(2, 2, 8)

    def slots(*pairs: tuple[int, int]) -> torch.Tensor:
        return torch.tensor(pairs).int()

    with pytest.raises(ShapeError, match=r"slots\[1\] names unit 99"):
        ops.reshape_and_cache(key, key, cache.key, cache.value, slots((0, 0), (99, 0)))
    with pytest.raises(ShapeError, match=r"slots\[0\] names row 4"):
        ops.reshape_and_cache(key, key, cache.key, cache.value, slots((0, 4), (0, 0)))
    with pytest.raises(ShapeError, match="slots is Long"):
        ops.reshape_and_cache(key, key, cache.key, cache.value, slots((0, 0), (0, 1)).long())
    with pytest.raises(ShapeError, match="key_cache has shape"):
        ops.reshape_and_cache(key[:, :1], key[:, :1], cache.key, cache.value, slots((0, 0), (0, 1)))
    arena = torch.zeros(2560, dtype=torch.uint8)
    with pytest.raises(ShapeError, match=r"copies\[0\] names unit 9"):
        ops.copy_blocks(arena, torch.tensor([[0, 9]]), 512)
    with pytest.raises(ShapeError, match=r"copies\[0\] names unit -1"):
        ops.copy_blocks(arena, torch.tensor([[-1, 0]]), 512)
