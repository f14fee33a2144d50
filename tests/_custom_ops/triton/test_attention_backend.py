"""The backend `triton`, interpreted, against the backend `torch` on the same batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.utils.paged import cumulative, make_paged_cache
from vllm._custom_ops.naive import cache as naive_cache
from vllm._custom_ops.triton import cudnn
from vllm.attention.backends import long_prompts
from vllm.attention.backends import triton as triton_backend
from vllm.attention.backends.abstract import AttentionBackend, AttentionParams
from vllm.attention.backends.table import load_backend
from vllm.batch import ForwardBatch, GroupBatch, LayerCache

HEADS, KV_HEADS, SIZE = 4, 2, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def place(x: Tensor) -> Tensor:
    """Bring a tensor where kernels run, with its strides."""
    if DEVICE == "cpu":
        return x
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).to(DEVICE)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.fixture(autouse=True)
def reference_cache_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write rows by the naive twin: no compiled op is under test."""
    monkeypatch.setattr(triton_backend, "reshape_and_cache", naive_cache.reshape_and_cache)


def make_case(
    rows: list[tuple[int, int]], *, num_decode_rows: int, says_lens: bool
) -> tuple[LayerCache, ForwardBatch, tuple[Tensor, Tensor, Tensor]]:
    """Return a cache, a batch of (computed, new) rows, and their query, K and V."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    lens = [c + n for c, n in rows]
    cache = make_paged_cache(lens, KV_HEADS, SIZE, 16, torch.float32)
    for i, (computed, _) in enumerate(rows):
        cache.write(i, 0, draw(computed, KV_HEADS, SIZE), draw(computed, KV_HEADS, SIZE))
    slots = torch.cat([cache.slots(i, c, c + n) for i, (c, n) in enumerate(rows)])
    new = [n for _, n in rows]
    batch = ForwardBatch(
        input_ids=place(torch.zeros(sum(new), dtype=torch.int64)),
        positions=place(torch.cat([torch.arange(c, c + n) for c, n in rows])),
        cu_query_lens=place(cumulative(new)),
        seq_lens=place(torch.tensor(lens).int()),
        logits_rows=torch.zeros(0, dtype=torch.int64),
        groups=(
            GroupBatch(
                block_offsets=place(cache.block_offsets), slots=place(slots), block_tokens=16
            ),
        ),
        max_query_len=max(new),
        max_seq_len=max(lens),
        num_decode_rows=num_decode_rows,
        new_lens_cpu=tuple(new) if says_lens else (),
        computed_lens_cpu=tuple(c for c, _ in rows) if says_lens else (),
    )
    query, key, value = (place(draw(sum(new), n, SIZE)) for n in (HEADS, KV_HEADS, KV_HEADS))
    tensors = (place(cache.key), place(cache.value))
    return LayerCache(group=0, tensors=tensors), batch, (query, key, value)


def run(
    backend: AttentionBackend,
    cache: LayerCache,
    batch: ForwardBatch,
    fresh: tuple[Tensor, Tensor | None, Tensor | None],
    params: AttentionParams,
) -> Tensor:
    """Return what a backend writes into poison."""
    out = torch.full_like(fresh[0], math.nan)
    backend.forward(out, *fresh, cache, batch, backend.plan(batch, 0), params)
    return out


CASES: dict[str, tuple[list[tuple[int, int]], int]] = {
    "decode": ([(40, 1), (0, 1), (17, 1)], 3),
    "whole prompts": ([(0, 20), (0, 33)], 0),
    "mixed": ([(40, 1), (5, 1), (0, 20), (30, 9)], 2),
    "decode beside whole prompts": ([(40, 1), (0, 20), (0, 20)], 1),
}


@pytest.mark.parametrize("says_lens", [False, True])
@pytest.mark.parametrize("window", [0, 12])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_the_oracle(
    case: tuple[list[tuple[int, int]], int], window: int, says_lens: bool
) -> None:
    cache, batch, fresh = make_case(case[0], num_decode_rows=case[1], says_lens=says_lens)
    params = AttentionParams(scale=SIZE**-0.5, window=window)
    expected = run(load_backend("torch"), cache, batch, fresh, params)
    found = run(load_backend("triton"), cache, batch, fresh, params)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


LONG: dict[str, tuple[list[tuple[int, int]], int]] = {
    "chunks": ([(40, 1), (40, 5), (33, 9)], 1),
    "joined": ([(40, 1), (0, 30), (33, 40)], 1),
    "both": ([(40, 9), (7, 30), (50, 2), (0, 20)], 0),
}


@pytest.mark.parametrize("reads_another", [False, True])
@pytest.mark.parametrize("window", [0, 12])
@pytest.mark.parametrize("case", LONG.values(), ids=LONG.keys())
def test_rows_with_cached_tokens(
    case: tuple[list[tuple[int, int]], int],
    window: int,
    reads_another: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_prompts, "MAX_CHUNK_TOKENS", 10)
    monkeypatch.setattr(long_prompts, "MIN_CHUNK_COMPUTED", 35)
    monkeypatch.setattr(long_prompts, "MIN_JOINED_TOKENS", 25)
    cache, batch, fresh = make_case(case[0], num_decode_rows=case[1], says_lens=True)
    plan = load_backend("triton").plan(batch, 0)
    assert (plan.chunks is not None) == any(n <= 10 for _, n in case[0][case[1] :])
    assert (plan.join(batch, window, cache) is not None) == any(n >= 25 for _, n in case[0])
    params = AttentionParams(scale=SIZE**-0.5, window=window)
    expected = run(load_backend("torch"), cache, batch, fresh, params)
    found = run(load_backend("triton"), cache, batch, fresh, params)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if reads_another:
        reader = replace(params, writes_cache=False)
        found = run(load_backend("triton"), cache, batch, (fresh[0], None, None), reader)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_layer_that_reads_anothers_cache() -> None:
    cache, batch, fresh = make_case([(40, 1), (9, 20)], num_decode_rows=1, says_lens=True)
    params = AttentionParams(scale=SIZE**-0.5)
    owner = run(load_backend("triton"), cache, batch, fresh, params)
    reader = replace(params, writes_cache=False)
    found = run(load_backend("triton"), cache, batch, (fresh[0], None, None), reader)
    torch.testing.assert_close(found, owner, rtol=1e-5, atol=1e-5)


class FakeCudnn:
    """Plain attention where cuDNN would be called; counts its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_calls = 0
        monkeypatch.setattr(cudnn, "run", self.run)
        monkeypatch.setattr(cudnn, "can_serve", lambda *heads: True)
        monkeypatch.setattr(cudnn, "MIN_EQUAL_TOKENS", 20)
        monkeypatch.setattr(cudnn, "EQUAL_STEP", 10)

    def run(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
        self.num_calls += 1
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        logits = query @ key.mT * scale
        is_seen = torch.ones_like(logits[0, 0], dtype=torch.bool).tril()
        return logits.masked_fill(~is_seen, -math.inf).softmax(-1) @ value


@pytest.mark.parametrize("has_cap", [False, True])
def test_equal_whole_prompts_go_to_cudnn(monkeypatch: pytest.MonkeyPatch, has_cap: bool) -> None:
    cache, batch, fresh = make_case([(40, 1), (0, 20), (0, 20)], num_decode_rows=1, says_lens=True)
    params = AttentionParams(scale=SIZE**-0.5)
    expected = run(load_backend("triton"), cache, batch, fresh, params)
    fake = FakeCudnn(monkeypatch)
    plain = replace(params, soft_cap=100.0) if has_cap else params
    found = run(load_backend("triton"), cache, batch, fresh, plain)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert fake.num_calls == (0 if has_cap else 1)
