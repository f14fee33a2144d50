"""The measured step is a real one, and its least cost is counted right."""

from __future__ import annotations

import pytest
import torch

from vllm.attention.backends.abstract import KernelQuery
from vllm.attention.backends.table import load_backend
from vllm.attention.measure.load import (
    Load,
    count_bytes,
    count_flops,
    count_visible,
    list_loads,
)
from vllm.attention.measure.workload import Workload, count_arena_bytes
from vllm.types import DType

MASKS = {
    "full": {},
    "window": {"window": 32, "sink_tokens": 4, "has_sink_logits": True, "soft_cap": 30.0},
    "chunk": {"chunk_tokens": 32},
    "one field": {"num_kv_heads": 1, "has_one_field": True},
}
LOADS = list_loads([3], [100], [50])


def make_query(**fields: object) -> KernelQuery:
    given = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "scale": 0.125, **fields}
    return KernelQuery(dtype=DType.FLOAT32, kv_dtype=DType.FLOAT32, **given)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.phase)
@pytest.mark.parametrize("mask", MASKS)
def test_kernels_agree_on_a_workload(mask: str, load: Load) -> None:
    query = make_query(**MASKS[mask])
    for rows_are_cached in (False, True):
        work = Workload(query, load, num_layers=2, stated_len=300, rows_are_cached=rows_are_cached)
        found = []
        for name in ("cpu", "torch"):
            work.run(load_backend(name))
            found.append(work._out.clone())
        torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
        assert found[0].abs().max() > 0.01


@pytest.mark.parametrize("mask", MASKS)
def test_visible_tokens_are_those_of_the_mask(mask: str) -> None:
    query = make_query(**MASKS[mask])
    for position in range(0, 100, 7):
        first = max(
            position + 1 - query.window if query.window else 0,
            position - position % query.chunk_tokens if query.chunk_tokens else 0,
        )
        seen = [p for p in range(position + 1) if p >= first or p < query.sink_tokens]
        assert count_visible(query, position) == len(seen)


def test_costs() -> None:
    decode, prefill = LOADS
    query = make_query()
    token_bytes, row_bytes = 2 * 4 * 64 * 4, 2 * 2 * 64 * 4
    assert count_bytes(query, decode) == 3 * (token_bytes + 100 * row_bytes)
    assert count_bytes(query, prefill) == 50 * (token_bytes + row_bytes)
    assert count_flops(query, decode) == 4 * 3 * 100 * 4 * 64
    assert count_flops(query, prefill) == 4 * (50 * 51 // 2) * 4 * 64
    windowed = make_query(window=32)
    assert count_bytes(windowed, decode) == 3 * (token_bytes + 32 * row_bytes)
    assert count_bytes(windowed, prefill) == count_bytes(query, prefill)
    assert count_arena_bytes(query, decode, 2) == (3 * 7 + 1) * 16 * row_bytes * 2
