"""Attention kernels against the naive twin: masks, sizes, splits, poison, padding, new rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.utils.ops import poisoned, random_rows
from tests.utils.paged import cumulative, make_paged_cache
from vllm._custom_ops.naive import attention as naive
from vllm._custom_ops.triton import attention as ops
from vllm._custom_ops.triton import attention_decode
from vllm._custom_ops.triton.attention_args import AttentionArgs
from vllm._custom_ops.triton.attention_decode import chunk_attention
from vllm._custom_ops.triton.attention_shape import Splits, split_head
from vllm.errors import ShapeError

# bfloat16: weights are rounded before they meet the values.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1.6e-2, 1.6e-2)}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": 37},
    "window and sinks": {"window": 70, "sink_tokens": 5},
    "chunk": {"chunk_tokens": 48},
    "chunk and sinks": {"chunk_tokens": 40, "sink_tokens": 3},
    "soft cap": {"soft_cap": 20.0},
    "learned sinks": {"has_sinks": True},
    "all": {"window": 100, "sink_tokens": 3, "soft_cap": 30.0, "has_sinks": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Rows of (computed, new) tokens; every cache row that no query sees is NaN.

    Attributes:
        has_one_field: whether keys are the values.
        is_fresh: whether new rows are given instead of cached.
        wide: elements of a row of the tensor that query, K and V are parts of, or 0.
    """

    rows: tuple[tuple[int, int], ...]
    heads: int = 2
    kv_heads: int = 1
    head_size: int = 32
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    block_tokens: int = 16
    is_fresh: bool = True
    has_one_field: bool = False
    wide: int = 0

    @property
    def new_lens(self) -> list[int]:
        """New tokens of each row."""
        return [new for _, new in self.rows]

    def arguments(self, **mask: Any) -> dict[str, Any]:
        """Return the op's arguments by name, on the CPU; `out` is poison."""
        size, lens = self.head_size, [sum(row) for row in self.rows]
        has_sinks = mask.pop("has_sinks", False)
        keys, values = (
            [
                random_rows(n, self.kv_heads, size, dtype=self.dtype, seed=seed + i)
                for i, n in enumerate(lens)
            ]
            for seed in (100, 100 if self.has_one_field else 200)
        )
        cache = make_paged_cache(lens, self.kv_heads, size, self.block_tokens, self.dtype)
        for i, (computed, new) in enumerate(self.rows):
            seen = naive._visible(
                computed,
                computed + new,
                mask.get("window", 0),
                mask.get("sink_tokens", 0),
                mask.get("chunk_tokens", 0),
            ).any(0)
            stored = torch.nonzero(seen[: computed if self.is_fresh else None]).flatten()
            cache.write_at(i, stored, keys[i][stored], values[i][stored])
        query = random_rows(sum(self.new_lens), self.heads, size, dtype=self.dtype, seed=1)
        fresh = [
            torch.cat([s[c:] for s, (c, _) in zip(source, self.rows, strict=True)])
            for source in (keys, values)
        ]
        if self.wide:
            query, fresh = self.widen(query, fresh)
        if self.has_one_field:
            fresh[1] = fresh[0]
        return {
            "out_THD": poisoned((sum(self.new_lens), self.heads, size), self.dtype),
            "query_THD": query,
            "key_cache": cache.key,
            "value_cache": cache.key if self.has_one_field else cache.value,
            "block_offsets_BN": cache.block_offsets,
            "cu_query_lens": cumulative(self.new_lens),
            "seq_lens": torch.tensor(lens).int(),
            "scale": size**-0.5,
            "sinks": torch.linspace(-1.0, 3.0, self.heads) if has_sinks else None,
            "fresh_key_THD": fresh[0] if self.is_fresh else None,
            "fresh_value_THD": fresh[1] if self.is_fresh else None,
            **mask,
        }

    def widen(self, query: Tensor, fresh: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Lay query, K and V side by side in rows of `wide` elements that are else NaN."""
        rows = torch.full((query.shape[0], self.wide), float("nan"), dtype=self.dtype)
        views, start = [], 8
        for part in (query, *fresh):
            view = rows[:, start : start + part[0].numel()].unflatten(1, part.shape[1:])
            view.copy_(part)
            views.append(view)
            start += part[0].numel()
        return views[0], views[1:]


def move(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    """Bring tensors to a device; the cache's views keep their strides."""
    if device == "cpu":
        return arguments
    moved: dict[str, Any] = {}
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            moved[name] = value
            continue
        flat = torch.as_strided(
            value, (value.untyped_storage().nbytes() // value.element_size(),), (1,), 0
        ).to(device)
        moved[name] = flat.as_strided(value.shape, value.stride(), value.storage_offset())
    return moved


def check(problem: Problem, device: str, **mask: Any) -> Tensor:
    """Run the op beside its twin; return what it wrote."""
    arguments = problem.arguments(**mask)
    expected = arguments["out_THD"].clone()
    naive.paged_attention(**(arguments | {"out_THD": expected}))
    moved = move(arguments, device)
    ops.paged_attention(**moved)
    rtol, atol = TOLERANCE[problem.dtype]
    torch.testing.assert_close(moved["out_THD"].cpu(), expected, rtol=rtol, atol=atol)
    return moved["out_THD"].cpu()


ROWS = ((0, 66), (90, 1), (0, 1), (77, 20))


@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_equals_twin(device: str, mask: dict[str, Any], is_fresh: bool) -> None:
    check(Problem(rows=ROWS, is_fresh=is_fresh), device, **mask)


@pytest.mark.parametrize("mask", ["full", "all"])
def test_bfloat16(device: str, mask: str) -> None:
    check(
        Problem(rows=ROWS, heads=4, kv_heads=2, head_size=64, dtype=torch.bfloat16),
        device,
        **MASKS[mask],
    )


@pytest.mark.parametrize("block_tokens", [1, 7, 8, 32])
def test_block_sizes(device: str, block_tokens: int) -> None:
    check(Problem(rows=((40, 9), (50, 1)), block_tokens=block_tokens), device, window=30)


@pytest.mark.parametrize("head_size", [8, 40, 64, 80, 112, 128, 192])
def test_head_sizes(device: str, head_size: int) -> None:
    check(Problem(rows=((20, 17), (36, 1)), head_size=head_size), device)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (7, 1), (6, 3)])
def test_groups_of_heads(device: str, heads: int, kv_heads: int) -> None:
    check(Problem(rows=((20, 5), (36, 1)), heads=heads, kv_heads=kv_heads), device)


@pytest.mark.parametrize("heads", [40, 140])
def test_large_groups_take_several_programs(device: str, heads: int) -> None:
    check(Problem(rows=((36, 1),), heads=heads, kv_heads=2), device)


@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.parametrize(("heads", "size"), [(3, 40), (4, 576)])
def test_rows_that_are_key_and_value(device: str, heads: int, size: int, is_fresh: bool) -> None:
    problem = Problem(
        rows=((20, 18), (50, 1)),
        heads=heads,
        kv_heads=1,
        head_size=size,
        has_one_field=True,
        is_fresh=is_fresh,
    )
    check(problem, device)


def test_query_and_new_rows_may_be_parts_of_wider_rows(device: str) -> None:
    problem = Problem(rows=((20, 18), (50, 1)), kv_heads=2)
    whole = check(problem, device)
    assert torch.equal(check(replace(problem, wide=32 * 6 + 24), device), whole)


@pytest.mark.parametrize("mask", ["full", "window and sinks", "learned sinks"])
def test_long_rows_are_split_and_folded(device: str, mask: str) -> None:
    problem = Problem(rows=((700, 1), (5, 1), (300, 1)))
    check(problem, device, **MASKS[mask])


def make_args(arguments: dict[str, Any]) -> AttentionArgs:
    """Return arguments of the op as the backend gives them."""
    return AttentionArgs(
        out=arguments["out_THD"],
        query=arguments["query_THD"],
        key_cache=arguments["key_cache"],
        value_cache=arguments["value_cache"],
        block_offsets=arguments["block_offsets_BN"],
        cu_query_lens=arguments["cu_query_lens"],
        seq_lens=arguments["seq_lens"],
        scale=arguments["scale"],
        window=arguments.get("window", 0),
        soft_cap=arguments.get("soft_cap", 0.0),
        sinks=arguments["sinks"],
        sink_tokens=arguments.get("sink_tokens", 0),
        chunk_tokens=arguments.get("chunk_tokens", 0),
        fresh_key=arguments["fresh_key_THD"],
        fresh_value=arguments["fresh_value_THD"],
    )


def attend(arguments: dict[str, Any], num_decode_rows: int, max_seq_len: int) -> Tensor:
    """Run the backend's entry on arguments of the op."""
    lens = arguments["cu_query_lens"].diff()
    ops.attend(
        make_args(arguments),
        num_decode_rows=num_decode_rows,
        max_query_len=int(lens.max()),
        max_seq_len=max_seq_len,
    )
    return arguments["out_THD"]


@pytest.mark.parametrize("window", [0, 40])
def test_the_backends_entry_equals_the_op(device: str, window: int) -> None:
    problem = Problem(rows=((90, 1), (0, 1), (37, 40), (0, 20), (4, 1)))
    expected = check(problem, device, window=window)
    arguments = move(problem.arguments(window=window), device)
    for num_decode_rows in (0, 2):
        arguments["out_THD"].fill_(float("nan"))
        found = attend(arguments, num_decode_rows, 4096).cpu()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_prompts_need_no_cache(device: str) -> None:
    problem = Problem(rows=((0, 70), (0, 20)))
    expected = check(problem, device)
    arguments = move(problem.arguments(), device)
    arguments |= {"key_cache": None, "value_cache": None, "block_offsets_BN": None}
    assert torch.equal(attend(arguments, 0, 4096).cpu(), expected)


@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_short_ends_of_prompts_are_split(device: str, mask: dict[str, Any], is_fresh: bool) -> None:
    problem = Problem(
        rows=((90, 1), (300, 20), (0, 70), (150, 3)), heads=6, kv_heads=2, is_fresh=is_fresh
    )
    arguments = problem.arguments(**mask)
    expected = arguments["out_THD"].clone()
    naive.paged_attention(**(arguments | {"out_THD": expected}))
    moved = move(arguments, device)
    rows = torch.tensor([1, 3], dtype=torch.int32, device=device)
    chunk_attention(make_args(moved), rows, 20, 320)
    found = moved["out_THD"].cpu()
    for tokens in (slice(1, 21), slice(91, 94)):
        torch.testing.assert_close(found[tokens], expected[tokens], rtol=1e-5, atol=1e-5)
    assert found[:1].isnan().all()
    assert found[21:91].isnan().all()


def test_padding_rows_are_zero_and_read_nothing(device: str) -> None:
    problem = Problem(rows=((40, 1), (9, 1)))
    expected = check(problem, device)
    arguments = move(problem.arguments(), device)
    for name, more in (("query_THD", 2), ("fresh_key_THD", 2), ("fresh_value_THD", 2)):
        rows = arguments[name]
        arguments[name] = torch.cat((rows, torch.full_like(rows[:more], float("nan"))))
    arguments["out_THD"] = torch.full_like(arguments["query_THD"], float("nan"))
    arguments["cu_query_lens"] = torch.arange(5, dtype=torch.int32, device=device)
    arguments["seq_lens"] = torch.cat((arguments["seq_lens"], arguments["seq_lens"].new_zeros(2)))
    table = arguments["block_offsets_BN"]
    arguments["block_offsets_BN"] = torch.cat((table, torch.full_like(table, 1 << 30)))
    found = attend(arguments, 4, 4096).cpu()
    torch.testing.assert_close(found[:2], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[2:], torch.zeros_like(found[2:]))
    arguments["out_THD"].fill_(float("nan"))
    assert torch.equal(attend(arguments, 4, 4096).cpu(), found)  # the counters were left at zero


def test_a_prompt_has_the_same_bits_however_it_is_cut(device: str) -> None:
    problem = Problem(rows=((0, 80),), heads=1)
    whole = check(problem, device)
    for computed in (1, 32, 50):
        part = replace(problem, rows=((computed, 80 - computed),)).arguments()
        part["query_THD"] = problem.arguments()["query_THD"][computed:]
        moved = move(part, device)
        ops.paged_attention(**moved)
        if device == "cpu":
            assert torch.equal(moved["out_THD"].cpu(), whole[computed:])
        else:  # a product on tensor cores adds in an order that its tile decides
            torch.testing.assert_close(moved["out_THD"].cpu(), whole[computed:])


def test_heads_are_cut_into_powers_of_two() -> None:
    cuts = {8: (16, 0), 64: (64, 0), 80: (64, 16), 96: (64, 32), 112: (128, 0), 192: (128, 64)}
    assert {size: split_head(size) for size in cuts} == cuts
    assert split_head(576) == (512, 64)


def test_a_row_takes_more_splits_than_usual_only_where_it_is_long(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = Splits(launched=3, even=1)
    monkeypatch.setattr(attention_decode, "count_splits", lambda *_: splits)
    monkeypatch.setattr(attention_decode, "LONG_SPLIT", 64)
    check(Problem(rows=((40, 1), (300, 1), (100, 1)), heads=7), device)


def test_bad_arguments_name_what_was_given() -> None:
    arguments = Problem(rows=((0, 4),), kv_heads=2).arguments()
    bad = (
        ("out has shape", {"out_THD": torch.empty(4, 4, 8)}),
        ("float64", {"query_THD": arguments["query_THD"].double()}),
        ("cannot share", {"query_THD": torch.empty(4, 3, 32), "out_THD": torch.empty(4, 3, 32)}),
    )
    for text, wrong in bad:
        with pytest.raises(ShapeError, match=text):
            ops.paged_attention(**(arguments | wrong))
