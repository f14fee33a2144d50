"""Paged attention against its twin: masks, sizes, poison, the same bits by every route."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.utils.ops import FLOAT_DTYPES, poisoned, random_rows
from tests.utils.paged import PagedCache, cumulative, make_paged_cache
from vllm._custom_ops import attention as ops
from vllm._custom_ops.naive import attention as naive
from vllm.errors import ShapeError

# bfloat16: weights are rounded to bfloat16 before they meet the values, as transformers does.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1.6e-2, 1.6e-2)}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": 37},
    "window and sinks": {"window": 70, "sink_tokens": 5},
    "chunk": {"chunk_tokens": 48},
    "soft cap": {"soft_cap": 20.0},
    "learned sinks": {"sinks": True},
    "all": {"window": 100, "sink_tokens": 3, "soft_cap": 30.0, "sinks": True},
}


class Rows:
    """Random rows: queries, keys and values of every position of every row."""

    def __init__(
        self, lens: list[int], heads: int, kv_heads: int, head_size: int, dtype: torch.dtype
    ) -> None:
        self.lens, self.dtype = lens, dtype
        self.query = [
            random_rows(n, heads, head_size, dtype=dtype, seed=i) for i, n in enumerate(lens)
        ]
        self.key, self.value = (
            [
                random_rows(n, kv_heads, head_size, dtype=dtype, seed=s + i)
                for i, n in enumerate(lens)
            ]
            for s in (100, 200)
        )
        self.sinks = torch.linspace(-1.0, 3.0, heads)
        self.scale = head_size**-0.5

    def run(
        self,
        op: Any,
        parts: list[tuple[int, int, int]],
        mask: dict[str, Any],
        *,
        fresh: bool = False,
        block_tokens: int = 16,
    ) -> list[Tensor]:
        """Compute positions begin … end - 1 of each (row, begin, end); what else is poison."""
        mask = dict(mask)
        if mask.pop("sinks", False):
            mask["sinks"] = self.sinks
        cache = self.cache_for(parts, mask, fresh, block_tokens)
        query, key, value = (
            torch.cat([source[row][begin:end] for row, begin, end in parts])
            for source in (self.query, self.key, self.value)
        )
        out = poisoned(query.shape, self.dtype)
        if fresh:
            mask |= {"fresh_key_THD": key, "fresh_value_THD": value}
        op.paged_attention(
            out,
            query,
            cache.key,
            cache.value,
            cache.block_offsets,
            cumulative([end - begin for _, begin, end in parts]),
            torch.tensor([end for _, _, end in parts]).int(),
            self.scale,
            **mask,
        )
        return list(out.split([end - begin for _, begin, end in parts]))

    def cache_for(
        self,
        parts: list[tuple[int, int, int]],
        mask: dict[str, Any],
        fresh: bool,
        block_tokens: int,
    ) -> PagedCache:
        """Write only what the parts may see; window, chunk and fresh rows leave NaN behind."""
        kv_heads, head_size = self.key[0].shape[1:]
        ends = [end for _, _, end in parts]
        cache = make_paged_cache(ends, kv_heads, head_size, block_tokens, self.dtype)
        for i, (row, begin, end) in enumerate(parts):
            stop = begin if fresh else end
            visible = naive._visible(
                begin,
                end,
                mask.get("window", 0),
                mask.get("sink_tokens", 0),
                mask.get("chunk_tokens", 0),
            ).any(0)
            seen = torch.nonzero(visible[:stop]).flatten()
            cache.write_at(i, seen, self.key[row][seen], self.value[row][seen])
        return cache


def assert_all_near(actual: list[Tensor], expected: list[Tensor]) -> None:
    rtol, atol = TOLERANCE[expected[0].dtype]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("fresh", [False, True])
def test_equals_twin(isa: str, dtype: torch.dtype, mask: dict[str, Any], fresh: bool) -> None:
    rows = Rows([200, 33, 1, 129, 64], 6, 2, 64, dtype)
    parts = [(0, 0, 200), (1, 32, 33), (2, 0, 1), (3, 77, 129), (4, 63, 64)]
    assert_all_near(
        rows.run(ops, parts, mask, fresh=fresh), rows.run(naive, parts, mask, fresh=fresh)
    )


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("head_size", [8, 32, 40, 72, 80, 96, 128, 176, 256, 576, 640])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (5, 1), (4, 4)])
def test_head_sizes(
    isa: str, dtype: torch.dtype, head_size: int, heads: int, kv_heads: int
) -> None:
    rows = Rows([83, 70], heads, kv_heads, head_size, dtype)
    parts = [(0, 40, 83), (1, 69, 70)]
    assert_all_near(
        rows.run(ops, parts, {}, block_tokens=7), rows.run(naive, parts, {}, block_tokens=7)
    )


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_same_bits_however_a_row_is_computed(
    isa: str, dtype: torch.dtype, mask: dict[str, Any]
) -> None:
    length = 600
    rows = Rows([length, 90], 6, 2, 32, dtype)
    whole = rows.run(ops, [(0, 0, length)], mask)[0]
    for chunk, fresh, threads in ((64, True, 1), (150, True, 2), (599, False, 2), (512, True, 2)):
        torch.set_num_threads(threads)
        for begin in range(0, length, chunk):
            end = min(begin + chunk, length)
            alone = rows.run(ops, [(0, begin, end)], mask, fresh=fresh)[0]
            assert torch.equal(alone, whole[begin:end]), (chunk, begin)
    for position in (0, 1, 63, 64, 511, 512, 599):
        last = (0, position, position + 1)
        for threads in (1, 2, 5):  # with threads to spare, the parts of a row are computed apart
            torch.set_num_threads(threads)
            assert torch.equal(rows.run(ops, [last], mask)[0][0], whole[position])
        together = rows.run(ops, [(1, 10, 90), last, (1, 89, 90), last], mask, block_tokens=32)
        assert torch.equal(together[1][0], whole[position])
        assert torch.equal(together[3][0], whole[position])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_long_rows_fold_their_parts(dtype: torch.dtype) -> None:
    rows = Rows([1300], 2, 1, 32, dtype)
    for mask in ({}, {"window": 600, "sink_tokens": 4}):
        actual, expected = (rows.run(op, [(0, 1290, 1300)], mask) for op in (ops, naive))
        assert_all_near(actual, expected)


def test_large_logits_do_not_overflow() -> None:
    rows = Rows([70], 1, 1, 8, torch.float32)
    rows.scale = 1e4
    assert_all_near(rows.run(ops, [(0, 60, 70)], {}), rows.run(naive, [(0, 60, 70)], {}))


def test_query_and_out_may_be_parts_of_wider_rows() -> None:
    rows = Rows([20], 4, 2, 16, torch.float32)
    cache = rows.cache_for([(0, 0, 20)], {}, False, 16)
    wide = torch.full((20, 8, 24), float("nan"))
    wide[:, 2:6, :16] = rows.query[0]
    out = poisoned((20, 5, 32), torch.float32)
    ops.paged_attention(
        out[:, 1:, 8:24],
        wide[:, 2:6, :16],
        cache.key,
        cache.value,
        cache.block_offsets,
        cumulative([20]),
        torch.tensor([20]).int(),
        rows.scale,
    )
    assert torch.equal(out[:, 1:, 8:24], rows.run(ops, [(0, 0, 20)], {})[0])
    assert out[:, 0].isnan().all() and out[:, :, :8].isnan().all() and out[:, :, 24:].isnan().all()


def test_offsets_are_widened_before_they_are_multiplied() -> None:
    """A block beyond 2 GiB of a lazily zeroed arena is found."""
    arena = torch.empty(3 << 30, dtype=torch.uint8)
    units = (arena.numel() - 4096) // 256
    view = arena.view(torch.bfloat16).as_strided((units, 4, 1, 8), (128, 8, 8, 1), 0)
    offset = units - 1
    view[offset].fill_(1.0)
    out = poisoned((1, 1, 8), torch.bfloat16)
    ops.paged_attention(
        out,
        torch.ones(1, 1, 8, dtype=torch.bfloat16),
        view,
        view,
        torch.tensor([[offset]]).int(),
        cumulative([1]),
        torch.tensor([4]).int(),
        1.0,
    )
    assert out.eq(1.0).all()


def test_no_rows() -> None:
    cache = make_paged_cache([4], 1, 8, 4, torch.float32)
    empty = torch.empty(0, 2, 8)
    ops.paged_attention(
        empty,
        empty,
        cache.key,
        cache.value,
        cache.block_offsets[:0],
        cumulative([]),
        torch.empty(0).int(),
        1.0,
    )


def test_bad_arguments_name_what_was_given() -> None:
    rows = Rows([20], 4, 2, 16, torch.float32)
    cache = rows.cache_for([(0, 0, 20)], {}, False, 16)
    arguments: dict[str, Any] = {
        "out_THD": torch.empty(20, 4, 16),
        "query_THD": rows.query[0],
        "key_cache": cache.key,
        "value_cache": cache.value,
        "block_offsets_BN": cache.block_offsets,
        "cu_query_lens": cumulative([20]),
        "seq_lens": torch.tensor([20]).int(),
        "scale": 1.0,
    }
    bad: list[tuple[str, dict[str, Any]]] = [
        ("out has shape", {"out_THD": torch.empty(20, 4, 8)}),
        (
            "cannot share 2 KV heads",
            {"query_THD": torch.empty(20, 3, 16), "out_THD": torch.empty(20, 3, 16)},
        ),
        (
            "head size is 12",
            {"query_THD": torch.empty(20, 4, 12), "out_THD": torch.empty(20, 4, 12)},
        ),
        (
            "key_cache is Float",
            {"query_THD": rows.query[0].bfloat16(), "out_THD": torch.empty(20, 4, 16).bfloat16()},
        ),
        ("seq_lens is Long", {"seq_lens": torch.tensor([20])}),
        ("20 new tokens of 19", {"seq_lens": torch.tensor([19]).int()}),
        ("there are 20 tokens", {"cu_query_lens": cumulative([19])}),
        ("needs 3 blocks", {"seq_lens": torch.tensor([40]).int()}),
        (r"block_offsets\[0, 1\] is -1", {"block_offsets_BN": torch.tensor([[0, -1]]).int()}),
        ("come together", {"fresh_key_THD": rows.key[0]}),
        ("sinks has shape", {"sinks": torch.empty(3)}),
        ("must not be negative", {"window": -1}),
    ]
    for message, change in bad:
        with pytest.raises(ShapeError, match=message):
            ops.paged_attention(**(arguments | change))
