"""Attention within prompts against the naive twin: values shorter than keys, more keys."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.utils.ops import poisoned, random_rows
from tests.utils.paged import cumulative
from vllm._custom_ops.naive import attention as naive
from vllm._custom_ops.triton import attention as ops


@pytest.mark.parametrize(("size", "value_size"), [(24, 24), (48, 32), (40, 24)])
def test_prompt_attention_equals_twin(device: str, size: int, value_size: int) -> None:
    lens = cumulative([40, 1, 20])
    query = random_rows(61, 4, size, dtype=torch.float32, seed=0)
    key, value = (
        random_rows(61, 2, n, dtype=torch.float32, seed=i) for i, n in ((1, size), (2, value_size))
    )
    expected = poisoned((61, 4, value_size), query.dtype)
    found = expected.to(device, copy=True)
    naive.prompt_attention(expected, query, key, value, lens, 40, 0.2)
    moved = (x.to(device) for x in (query, key, value, lens))
    ops.prompt_attention(found, *moved, 40, 0.2)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_rows_with_more_keys_than_queries(device: str) -> None:
    lens, key_lens = cumulative([40, 1, 20]), cumulative([90, 30, 20])
    query = random_rows(61, 4, 48, dtype=torch.float32, seed=0)
    key, value = (random_rows(140, 2, n, dtype=torch.float32, seed=n) for n in (48, 32))
    expected = poisoned((61, 4, 32), query.dtype)
    found = expected.to(device, copy=True)
    naive.prompt_attention(expected, query, key, value, lens, 40, 0.2, key_lens)
    moved = (x.to(device) for x in (query, key, value, lens))
    ops.prompt_attention(found, *moved, 40, 0.2, key_lens.to(device))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
