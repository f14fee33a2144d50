"""Attention within whole prompts against the naive twin: values shorter than keys, whole tiles."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.utils.ops import poisoned, random_rows
from tests.utils.paged import cumulative
from vllm._custom_ops.naive import attention as naive
from vllm._custom_ops.triton import attention as ops
from vllm._custom_ops.triton import attention_prefill


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


def test_shorter_values_in_whole_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_prefill, "can_copy_tiles", lambda device: True)
    monkeypatch.setenv("VLLM_TRIED_FORMS", "copies")
    monkeypatch.setattr(attention_prefill, "_MIN_TILED_TOKENS", 1)
    lens, dtype = cumulative([150, 200]), torch.bfloat16
    query = random_rows(350, 2, 48, dtype=dtype, seed=0)
    key = random_rows(350, 2, 48, dtype=dtype, seed=1)
    value = random_rows(350, 2, 56, dtype=dtype, seed=2)[:, :, 24:]
    expected = poisoned((350, 2, 32), dtype)
    found = expected.to(device, copy=True)
    naive.prompt_attention(expected, query, key, value, lens, 200, 0.2)
    moved = (x.to(device) for x in (query, key, value, lens))
    ops.prompt_attention(found, *moved, 200, 0.2)
    torch.testing.assert_close(found.cpu(), expected, rtol=1.6e-2, atol=1.6e-2)


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
