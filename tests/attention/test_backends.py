"""The CPU's two kernels equal each other, and a loop over single keys, over random geometries."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from vllm.attention.backends.abstract import AttentionBackend, AttentionParams
from vllm.attention.backends.paged_attn import PagedAttention
from vllm.attention.backends.table import load_backend
from vllm.batch import ForwardBatch, GroupBatch, LayerCache
from vllm.cache_spec import CacheField
from vllm.types import DType
from vllm.utils.tensors import to_torch_dtype, view_cache_field

TOLERANCE = {DType.FLOAT32: 2e-5, DType.BFLOAT16: 2e-2}


@dataclass
class Problem:
    """Random rows on an arena full of NaN, with the full histories beside it."""

    batch: ForwardBatch
    arena: Tensor
    cache: LayerCache
    params: AttentionParams
    query: Tensor
    key: Tensor
    value: Tensor
    histories: list[tuple[Tensor, Tensor]]  # float32 K and V of each row, new tokens last


def make_problem(seed: int, dtype: DType) -> Problem:
    pick = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = pick.choice((1, 4, 8, 16, 32))
    kv_heads = pick.choice((1, 2, 3))
    heads = kv_heads * pick.choice((1, 2, 4))
    size = pick.choice((32, 40, 64, 80, 128))
    shape = (kv_heads, size)
    num_rows = pick.randrange(1, 6)
    new = [pick.choice((1, 1, 2, 7, 33)) for _ in range(num_rows)]
    computed = [pick.choice((0, 0, 1, 15, 16, 50)) for _ in range(num_rows)]
    lens = [c + n for c, n in zip(computed, new, strict=True)]
    width = -(-max(lens) // tokens) + 1
    place = CacheField(name="k", shape=shape, dtype=dtype)
    field_bytes = -(-place.unit_bytes * tokens // 64) * 64
    units = -(-2 * field_bytes // 256) + pick.randrange(3)
    num_blocks = width * num_rows
    arena = torch.full(((num_blocks + 2) * units * 256,), 0xFF, dtype=torch.uint8)
    cache = LayerCache(
        group=0,
        tensors=tuple(
            view_cache_field(arena, place, i * field_bytes, units * 256, tokens) for i in range(2)
        ),
    )
    order = torch.randperm(num_blocks, generator=generator)
    offsets = (order * units).to(torch.int32).view(num_rows, width)
    torch_dtype = to_torch_dtype(dtype)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(torch_dtype)

    histories, slots, positions, starts = [], [], [], [0]
    for row, length in enumerate(lens):
        history = draw(length, *shape), draw(length, *shape)
        histories.append((history[0].float(), history[1].float()))
        for position in range(length):
            block, inside = offsets[row, position // tokens], position % tokens
            if position < computed[row]:
                cache.tensors[0][block, inside] = history[0][position]
                cache.tensors[1][block, inside] = history[1][position]
            else:
                slots.append((int(block), inside))
                positions.append(position)
        starts.append(starts[-1] + new[row])
    window, chunk = pick.choice(((0, 0), (0, 0), (1, 0), (9, 0), (0, 8), (20, 0)))
    group = GroupBatch(
        block_offsets=offsets,
        slots=torch.tensor(slots, dtype=torch.int32),
        block_tokens=tokens,
    )
    batch = ForwardBatch(
        input_ids=torch.zeros(len(slots), dtype=torch.int64),
        positions=torch.tensor(positions),
        cu_query_lens=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        logits_rows=torch.zeros(0, dtype=torch.int64),
        groups=(group,),
        max_query_len=max(new),
        max_seq_len=max(lens),
        num_decode_rows=0,
    )
    params = AttentionParams(
        scale=pick.choice((size**-0.5, 0.3)),
        window=window,
        chunk_tokens=chunk,
        sink_tokens=pick.choice((0, 0, 2)) if window or chunk else 0,
        soft_cap=pick.choice((0.0, 0.0, 5.0)),
        sinks=torch.randn(heads, generator=generator) if pick.random() < 0.3 else None,
    )
    fresh = [
        torch.cat([h[i][-n:] for h, n in zip(histories, new, strict=True)]).to(torch_dtype)
        for i in range(2)
    ]
    return Problem(
        batch=batch,
        arena=arena,
        cache=cache,
        params=params,
        query=draw(len(slots), heads, size),
        key=fresh[0],
        value=fresh[1],
        histories=histories,
    )


def attend_slowly(problem: Problem) -> Tensor:
    """One query, one head, one key at a time, in float64."""
    p = problem.params
    out = torch.zeros_like(problem.query, dtype=torch.float64)
    starts = problem.batch.cu_query_lens.tolist()
    repeats = problem.query.shape[1] // problem.key.shape[1]
    for row, (keys, values) in enumerate(problem.histories):
        for token in range(starts[row], starts[row + 1]):
            position = int(problem.batch.positions[token])
            seen = [j for j in range(position + 1) if is_visible(position, j, p)]
            for head in range(problem.query.shape[1]):
                kv = head // repeats
                query = problem.query[token, head].double()
                logits = (keys[seen, kv].double() @ query) * p.scale
                if p.soft_cap:
                    logits = p.soft_cap * torch.tanh(logits / p.soft_cap)
                if p.sinks is not None:
                    logits = torch.cat((logits, p.sinks[head : head + 1].double()))
                weights = logits.softmax(0)[: len(seen)]
                out[token, head] = weights @ values[seen, kv].double()
    return out


def is_visible(position: int, key: int, p: AttentionParams) -> bool:
    if key < p.sink_tokens:
        return True
    if p.window and key <= position - p.window:
        return False
    return not (p.chunk_tokens and key // p.chunk_tokens != position // p.chunk_tokens)


def run(backend: AttentionBackend, problem: Problem) -> Tensor:
    out = torch.full_like(problem.query, math.nan)
    plan = backend.plan(problem.batch, 0)
    backend.forward(
        out,
        problem.query,
        problem.key,
        problem.value,
        problem.cache,
        problem.batch,
        plan,
        problem.params,
    )
    return out


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("name", ["cpu", "torch"])
@pytest.mark.parametrize("seed", range(25))
def test_random_geometries_equal_a_loop_over_keys(seed: int, name: str, dtype: DType) -> None:
    problem = make_problem(seed, dtype)
    expected = attend_slowly(problem)
    found = run(load_backend(name), problem)
    assert (found.double() - expected).abs().max() <= TOLERANCE[dtype] * max(
        1, expected.abs().max()
    )


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_new_rows_are_in_the_cache_afterwards_and_nothing_else_is_touched(name: str) -> None:
    problem = make_problem(3, DType.FLOAT32)
    before = problem.arena.clone()
    run(load_backend(name), problem)
    slots = problem.batch.groups[0].slots.long()
    for view, rows in zip(problem.cache.tensors, (problem.key, problem.value), strict=True):
        assert torch.equal(view[slots[:, 0], slots[:, 1]], rows)
        view[slots[:, 0], slots[:, 1]] = math.nan
    problem.arena[problem.arena != before] = 0xFF  # NaN has many spellings
    assert torch.equal(problem.arena, before)


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_a_layer_that_reads_anothers_cache_equals_the_owner(name: str) -> None:
    problem = make_problem(5, DType.FLOAT32)
    backend = load_backend(name)
    owner = run(backend, problem)
    problem.key = problem.value = None
    torch.testing.assert_close(run(backend, problem), owner, atol=1e-5, rtol=0)


def test_padding_tokens_write_nothing() -> None:
    for name in ("cpu", "torch"):
        problem = make_problem(4, DType.FLOAT32)
        slots = problem.batch.groups[0].slots
        skipped = slots[0].clone()
        slots[0, 0] = -1
        run(load_backend(name), problem)
        assert torch.isnan(problem.cache.tensors[0][skipped[0], skipped[1]]).all()


def test_dispatch_takes_the_named_kernel_and_the_step_plan() -> None:
    problem = make_problem(6, DType.FLOAT32)
    plans = PagedAttention.plan(problem.batch, [(0, "cpu"), (0, "torch")])
    assert set(plans) == {(0, "cpu"), (0, "torch")}
    results = [
        PagedAttention.forward(
            problem.query,
            problem.key,
            problem.value,
            problem.cache,
            problem.batch,
            plans,
            problem.params,
            layer_impl=name,
        )
        for name in ("cpu", "torch", None)
    ]
    assert torch.equal(results[0], results[2])
    torch.testing.assert_close(results[0], results[1], atol=2e-5, rtol=0)
