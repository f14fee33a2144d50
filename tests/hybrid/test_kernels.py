"""Both kernels of a CPU serve every lifetime: the mask is exact, and dead rows are never read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vllm.attention.backends.table import load_backend
from vllm.attention.layer import Attention
from vllm.batch import ForwardBatch, GroupBatch, LayerCache
from vllm.cache_spec import BLOCK_ALIGNMENT_BYTES, Chunk, Full, Lifetime, Window, make_group
from vllm.types import DType
from vllm.utils.tensors import view_cache_field

HEADS, KV_HEADS, SIZE = 4, 2, 32
LIFETIMES = [
    Full(), Window(tokens=1), Window(tokens=7), Window(tokens=20, sinks=3), Chunk(tokens=8),
    Chunk(tokens=24),
]  # fmt: skip


def make_layer(lifetime: Lifetime) -> Attention:
    layer = Attention(0, HEADS, KV_HEADS, SIZE, SIZE**-0.5, Full(), dtype=DType.FLOAT32)
    layer.limit(lifetime, "type", None)
    return layer


def sees(query: int, key: int, lifetime: Lifetime) -> bool:
    match lifetime:
        case Window(tokens=tokens, sinks=sinks):
            return key <= query and (key > query - tokens or key < sinks)
        case Chunk(tokens=tokens):
            return key <= query and key >= query // tokens * tokens
    return key <= query


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lifetime: Lifetime) -> torch.Tensor:
    """The definition, one query at a time: [T, H, D]."""
    rows = []
    for t in range(len(q)):
        seen = [s for s in range(len(k)) if sees(t, s, lifetime)]
        keys, values = (x[seen].repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        weights = torch.einsum("hd,shd->hs", q[t], keys) * SIZE**-0.5
        rows.append(torch.einsum("hs,shd->hd", weights.softmax(-1), values))
    return torch.stack(rows)


class OneSequence:
    """A cache that stores only rows that some later step can see; all else is NaN."""

    def __init__(self, layer: Attention, block_tokens: int) -> None:
        self.layer = layer
        group = make_group("g", [layer.spec], block_tokens)
        self.tokens = block_tokens
        self.units = group.block_bytes // BLOCK_ALIGNMENT_BYTES
        arena = torch.full((40 * group.block_bytes,), 0xFF, dtype=torch.uint8)
        views = (
            view_cache_field(arena, p.field, p.offset_bytes, group.block_bytes, block_tokens)
            for p in group.places
        )
        self.cache = LayerCache(group=0, tensors=tuple(views))
        self.computed = 0

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: str) -> torch.Tensor:
        lifetime, start, stop = self.layer.spec.lifetime, self.computed, self.computed + len(q)
        width = -(-stop // self.tokens)
        live = {s // self.tokens for s in range(stop) if sees(stop, s, lifetime)}
        table = [b * self.units if b in live else 39 * self.units for b in range(width)]
        slots = [
            [table[p // self.tokens] if p // self.tokens in live else -1, p % self.tokens]
            for p in range(start, stop)
        ]
        read = {s // self.tokens for s in range(start) if sees(start, s, lifetime)}
        offsets = [b * self.units if b in live | read else 39 * self.units for b in range(width)]
        batch = ForwardBatch(
            input_ids=torch.zeros(len(q), dtype=torch.int64),
            positions=torch.arange(start, stop),
            cu_query_lens=torch.tensor([0, len(q)], dtype=torch.int32),
            seq_lens=torch.tensor([stop], dtype=torch.int32),
            logits_rows=torch.tensor([len(q) - 1]),
            groups=(
                GroupBatch(
                    block_offsets=torch.tensor([offsets], dtype=torch.int32),
                    slots=torch.tensor(slots, dtype=torch.int32),
                    block_tokens=self.tokens,
                ),
            ),
            max_query_len=len(q),
            max_seq_len=stop,
            num_decode_rows=int(len(q) == 1),
        )
        backend = load_backend(kernel)
        out = torch.full_like(q, float("nan"))
        backend.forward(out, q, k, v, self.cache, batch, backend.plan(batch, 0), self.layer.params)
        self.computed = stop
        return out


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
@pytest.mark.parametrize("block_tokens", [8, 16])
@pytest.mark.parametrize("lifetime", LIFETIMES, ids=str)
def test_every_lifetime(kernel: str, block_tokens: int, lifetime: Lifetime) -> None:
    generator = torch.Generator().manual_seed(3)
    total = 61
    q = torch.randn(total, HEADS, SIZE, generator=generator)
    k, v = (torch.randn(total, KV_HEADS, SIZE, generator=generator) for _ in range(2))
    expected = attend(q, k, v, lifetime)
    for chunks in ((61,), (1,) * 61, (30, 17, 1, 13), (5, 40, 16)):
        sequence = OneSequence(make_layer(lifetime), block_tokens)
        found, start = [], 0
        for size in chunks:
            part = slice(start, start + size)
            found.append(sequence.step(q[part], k[part], v[part], kernel))
            start += size
        torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
def test_a_reader_sees_the_owners_new_rows_and_writes_none(kernel: str) -> None:
    """A layer that reads another's cache is given rows that the owner need not have stored."""
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(40, HEADS, SIZE, generator=generator)
    k, v = (torch.randn(40, KV_HEADS, SIZE, generator=generator) for _ in range(2))
    owner = make_layer(Window(tokens=7))
    sequence = OneSequence(owner, 8)
    sequence.step(q[:30], k[:30], v[:30], kernel)
    before = [tensor.clone() for tensor in sequence.cache.tensors]
    owner.params = replace(owner.params, writes_cache=False)
    found = sequence.step(q[30:], k[30:], v[30:], kernel)
    expected = attend(q, k, v, Window(tokens=7))[30:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for old, new in zip(before, sequence.cache.tensors, strict=True):
        assert torch.equal(old.nan_to_num(), new.nan_to_num())


def test_a_window_of_the_model_is_only_narrowed() -> None:
    layer = Attention(0, HEADS, KV_HEADS, SIZE, 1.0, Full(), dtype=DType.FLOAT32, window=16)
    layer.limit(Window(tokens=64), "type", None)
    assert layer.params.window == layer.query.window == 16
    layer.limit(Window(tokens=8, sinks=2), "type", "torch")
    assert (layer.params.window, layer.query.sink_tokens, layer.layer_impl) == (8, 2, "torch")
    assert (layer.spec.kind, layer.spec.lifetime) == ("type", Window(tokens=8, sinks=2))
