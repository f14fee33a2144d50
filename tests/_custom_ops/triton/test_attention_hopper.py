"""Attention of prompts by Hopper's means against plain attention: windows, cut rows, NaN beside."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests._custom_ops.triton import gluon_stand_in
from tests._custom_ops.triton import test_attention_backend as steps
from tests._custom_ops.triton.test_attention import Problem, move
from tests._custom_ops.triton.test_attention import make_args as make_paged_args
from tests.utils.ops import poisoned, random_rows
from tests.utils.paged import cumulative
from vllm._custom_ops.naive import attention as naive
from vllm._custom_ops.naive.cache import reshape_and_cache
from vllm._custom_ops.triton import attention_hopper, attention_warps
from vllm._custom_ops.triton.attention import attend
from vllm._custom_ops.triton.attention_args import AttentionArgs, PrefixRows
from vllm._custom_ops.triton.attention_hopper import can_attend
from vllm._custom_ops.triton.attention_prefill import prefill_attention
from vllm._custom_ops.triton.attention_shape import PREFIX_ALIGNMENT
from vllm.attention.backends import long_prompts
from vllm.attention.backends import triton as triton_backend
from vllm.attention.backends.abstract import AttentionParams
from vllm.attention.backends.long_prompts import plan_joined
from vllm.attention.backends.table import load_backend

Rows = list[tuple[int, int]]  # (computed, new) tokens
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play a Hopper of few processors on a CPU; others are left out."""
    gluon_stand_in.play_hopper(monkeypatch, (attention_hopper, attention_warps))


def keep(row: tuple[int, int], window: int) -> int:
    """Return how many cached rows are laid before the new ones."""
    return min(row[0], window - 1) if window else row[0]


def make_args(
    rows: Rows, heads: int, kv_heads: int, size: int, *, window: int = 0, where: str = "cpu"
) -> AttentionArgs:
    """Return arguments; query, K and V lie in wider rows."""
    new = [n for _, n in rows]
    seen = [keep(row, window) + row[1] for row in rows]
    query = random_rows(sum(new), heads + 2, size, dtype=BF16, seed=0)[:, :heads]
    both = random_rows(sum(seen), 2 * kv_heads, size, dtype=BF16, seed=1)
    return AttentionArgs(
        out=poisoned((sum(new), heads, size), BF16).to(where),
        query=query.to(where),
        key_cache=None,
        value_cache=None,
        block_offsets=None,
        cu_query_lens=cumulative(new).to(where),
        seq_lens=torch.tensor([sum(row) for row in rows], dtype=torch.int32, device=where),
        scale=size**-0.5,
        window=window,
        soft_cap=0.0,
        sinks=None,
        sink_tokens=0,
        chunk_tokens=0,
        fresh_key=both[:, :kv_heads].to(where),
        fresh_value=both[:, kv_heads:].to(where),
        cu_key_lens=cumulative(seen).to(where),
    )


def leave_new(args: AttentionArgs, rows: Rows) -> AttentionArgs:
    """Return the same with new rows apart from those before them."""
    assert args.fresh_key is not None and args.fresh_value is not None
    assert args.cu_key_lens is not None
    parts: dict[str, list[Tensor]] = {"prefix": [], "new": []}
    both = torch.cat((args.fresh_key, args.fresh_value), 1)
    for i, (computed, new) in enumerate(rows):
        own = both[slice(*args.cu_key_lens[i : i + 2].tolist())]
        parts["prefix"].append(own[: len(own) - new + min(new, -computed % PREFIX_ALIGNMENT)])
        parts["new"].append(own[len(own) - new :])
    lens = cumulative([len(part) for part in parts["prefix"]]).to(both.device)
    prefix, new_rows = (torch.cat(parts[name]) for name in ("prefix", "new"))
    key, value = new_rows.chunk(2, 1)
    prefix_key, prefix_value = prefix.chunk(2, 1)
    return replace(
        args,
        fresh_key=key,
        fresh_value=value,
        cu_key_lens=None,
        prefix=PrefixRows(key=prefix_key, value=prefix_value, cu_lens=lens),
    )


def expect(args: AttentionArgs, rows: Rows, i: int) -> Tensor:
    """Return what row i reads, float32."""
    assert args.fresh_key is not None and args.fresh_value is not None
    assert args.cu_key_lens is not None
    (computed, new), kept = rows[i], keep(rows[i], args.window)
    tokens, keys = (
        slice(*lens[i : i + 2].tolist()) for lens in (args.cu_query_lens, args.cu_key_lens)
    )
    key, value = (
        x[keys].float().cpu().repeat_interleave(args.group, 1)
        for x in (args.fresh_key, args.fresh_value)
    )
    distance = torch.arange(new)[:, None] + kept - torch.arange(kept + new)
    is_seen = (distance >= 0) & (distance < (args.window or computed + new))
    logits = torch.einsum("qhd,khd->hqk", args.query[tokens].float().cpu(), key) * args.scale
    weights = logits.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def check(args: AttentionArgs, rows: Rows, *, min_query_len: int = 1) -> None:
    """Check each row alone: those of K and V of the others are NaN meanwhile."""
    assert args.fresh_key is not None and args.fresh_value is not None
    assert args.cu_key_lens is not None
    longest = max(new for _, new in rows)
    for i, (_, new) in enumerate(rows):
        keys = slice(*args.cu_key_lens[i : i + 2].tolist())
        key, value = (torch.full_like(x, torch.nan) for x in (args.fresh_key, args.fresh_value))
        key[keys], value[keys] = args.fresh_key[keys], args.fresh_value[keys]
        alone = replace(
            args, fresh_key=key, fresh_value=value, out=torch.full_like(args.out, torch.nan)
        )
        tokens = slice(*args.cu_query_lens[i : i + 2].tolist())
        assert can_attend(alone)
        attention_hopper.hopper_attention(alone, 0, len(rows), longest, min_query_len)
        found = alone.out[tokens].float().cpu()
        if new < min_query_len:
            assert found.isnan().all()
        else:
            torch.testing.assert_close(found, expect(args, rows, i), rtol=1.6e-2, atol=1.6e-2)
        apart = leave_new(alone, rows)
        if apart.prefix is not None and len(apart.prefix.key) > 0:
            alone.out[:] = torch.nan
            attention_hopper.hopper_attention(apart, 0, len(rows), longest, min_query_len)
            assert torch.equal(alone.out[tokens].float().cpu().nan_to_num(), found.nan_to_num())


@pytest.mark.parametrize("seed", range(6))
def test_rows_however_they_are_cut(device: str, seed: int) -> None:
    rng = random.Random(seed)
    rows = [
        (rng.choice([0, 64, rng.randrange(300)]), rng.choice([1, 128, rng.randrange(1, 200)]))
        for _ in range(rng.randrange(1, 4))
    ]
    heads, kv_heads = rng.choice([(2, 1), (3, 1), (4, 2), (2, 2)])
    window = rng.choice([0, 37, 64, 65, 200])
    args = make_args(rows, heads, kv_heads, 64, window=window, where=device)
    check(args, rows, min_query_len=rng.choice([1, 2]))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(3, 1, 128), (4, 2, 256), (1, 1, 256)])
@pytest.mark.parametrize("window", [0, 100])
def test_sizes_of_heads(device: str, heads: int, kv_heads: int, size: int, window: int) -> None:
    rows = [(70, 200), (0, 130)]
    check(make_args(rows, heads, kv_heads, size, window=window, where=device), rows)


def test_prompts_go_there(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(0, 130), (40, 70)]
    args = make_args(rows, 2, 1, 64, where=device)
    prefill_attention(args, 0, 2, 130, 1)
    found, args.out[:] = args.out.clone(), torch.nan
    attention_hopper.hopper_attention(args, 0, 2, 130, 1)
    assert torch.equal(found, args.out)


@pytest.mark.parametrize("has_new", [False, True])
@pytest.mark.parametrize("window", [0, 100])
def test_prompts_that_go_on(
    device: str, window: int, has_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_prompts, "MIN_JOINED_TOKENS", 100)
    rows = ((5, 1), (200, 150), (0, 90), (130, 70))
    problem = Problem(rows=rows, heads=4, kv_heads=2, head_size=64, dtype=BF16)
    arguments = problem.arguments(window=window)
    expected = arguments["out_THD"].clone()
    naive.paged_attention(**(arguments | {"out_THD": expected}))
    moved = make_paged_args(move(arguments, device))
    batch: Any = SimpleNamespace(
        num_decode_rows=1,
        new_lens_cpu=tuple(new for _, new in rows),
        computed_lens_cpu=tuple(computed for computed, _ in rows),
        seq_lens=moved.seq_lens,
    )
    joined = plan_joined(batch, window, 1, None, has_new=has_new)
    assert joined is not None
    attend(moved, num_decode_rows=1, max_query_len=150, max_seq_len=350, joined=joined)
    torch.testing.assert_close(moved.out.cpu(), expected, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize("window", [0, 100])
def test_steps_of_the_backend(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(long_prompts, "MIN_JOINED_TOKENS", 100)
    monkeypatch.setattr(triton_backend, "reshape_and_cache", reshape_and_cache)
    monkeypatch.setattr(steps, "SIZE", 64)
    rows = [(40, 1), (200, 150), (0, 130), (90, 70)]
    cache, batch, fresh = steps.make_case(rows, num_decode_rows=1, says_lens=True)
    cache = replace(cache, tensors=tuple(tensor.to(BF16) for tensor in cache.tensors))
    query, key, value = (tensor.to(BF16) for tensor in fresh)
    params = AttentionParams(scale=0.125, window=window)
    expected = steps.run(load_backend("torch"), cache, batch, (query, key, value), params)
    backend, out = load_backend("triton"), torch.full_like(query, torch.nan)
    plan = backend.plan(batch, 0)
    backend.forward(out, query, key, value, cache, batch, plan, params)
    torch.testing.assert_close(out, expected, rtol=1.6e-2, atol=1.6e-2)
    [joined] = plan.joined.values()
    assert not joined.has_new, "new rows are read in place"


def test_what_it_does_not_serve(device: str) -> None:
    args = make_args([(0, 100)], 2, 1, 64, where=device)
    assert can_attend(args)
    assert not can_attend(replace(args, soft_cap=30.0))
    assert not can_attend(replace(args, chunk_tokens=30))
    assert not can_attend(replace(args, query=args.query.float()))
    assert not can_attend(replace(args, query=args.query.flatten()[4:-124].view(-1, 2, 64)))


def test_a_prompt_has_the_same_bits_however_it_is_cut(device: str) -> None:
    whole = make_args([(0, 300)], 2, 1, 64, where=device)
    attention_hopper.hopper_attention(whole, 0, 1, 300, 1)
    for computed in (1, 64, 200):
        new = 300 - computed
        lens = torch.tensor([0, new], dtype=torch.int32, device=device)
        part = replace(
            whole,
            query=whole.query[computed:],
            out=torch.full_like(whole.out[computed:], torch.nan),
            cu_query_lens=lens,
        )
        attention_hopper.hopper_attention(part, 0, 1, new, 1)
        assert torch.equal(part.out, whole.out[computed:])
