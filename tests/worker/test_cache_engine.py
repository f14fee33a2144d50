"""The arena: sizes, views, offsets, cleaning of superblocks that change hands, copies."""

from __future__ import annotations

import pytest
import torch

from vllm.cache_spec import (
    CacheField,
    CacheLayout,
    Full,
    GroupLayout,
    LayerCacheSpec,
    State,
    Window,
)
from vllm.errors import ConfigError, OutOfMemoryError
from vllm.step import BlockCopy, NewRow, PlanRow, RowSampling, StepPlan
from vllm.types import DType
from vllm.worker.cache_engine import CacheEngine, allocate_arena

CPU = torch.device("cpu")


def make_spec(layer: int, heads: int = 2, size: int = 24, reads_from: int | None = None, **fields):
    kept = () if reads_from is not None else ("k", "v")
    return LayerCacheSpec(
        layer=layer,
        fields=tuple(CacheField(name=n, shape=(heads, size), dtype=DType.BFLOAT16) for n in kept),
        lifetime=fields.get("lifetime", Full()),
        reads_from=reads_from,
    )


SPECS = (make_spec(0), make_spec(1, heads=1, size=40), make_spec(2, reads_from=0), make_spec(3))


def make_layout(*groups: tuple[tuple[int, ...], int, int], num_superblocks: int = 4) -> CacheLayout:
    return CacheLayout(
        groups=tuple(
            GroupLayout(
                name=f"g{i}", layers=layers, block_tokens=tokens, blocks_per_superblock=blocks
            )
            for i, (layers, tokens, blocks) in enumerate(groups)
        ),
        num_superblocks=num_superblocks,
    )


def make_plan(**fields) -> StepPlan:
    return StepPlan(step=0, **fields)


def grow(*ids: list[int]) -> list[PlanRow]:
    return [PlanRow(seq_id=0, num_computed_tokens=0, num_new_tokens=1, new_block_ids=ids)]


def test_views_share_one_arena_without_overlap() -> None:
    cache = CacheEngine(SPECS, make_layout(((0, 1, 3), 4, 3)), CPU)
    geometry = cache.geometries[0]
    assert cache.arena.numel() == (4 + 1) * geometry.superblock_units * 256
    offsets = [geometry.get_offset(b) for b in range(12)]
    assert len(set(offsets)) == 12
    assert max(offsets) + geometry.block_units <= geometry.pad_offset
    cache.arena.zero_()
    for block, offset in enumerate(offsets):
        for layer in (0, 1, 3):
            for i, view in enumerate(cache.caches[layer].tensors):
                assert view.stride(0) * 2 == 256
                assert view.shape[1:] == (4, *SPECS[layer].fields[i].shape)
                assert not view[offset].any(), "two blocks overlap"
                view[offset] = 1 + (block * 31 + layer * 7 + i) % 200
    for block, offset in enumerate(offsets):
        for layer in (0, 1, 3):
            for i, view in enumerate(cache.caches[layer].tensors):
                assert (view[offset] == 1 + (block * 31 + layer * 7 + i) % 200).all()


def test_a_layer_that_reads_another_shares_its_views() -> None:
    cache = CacheEngine(SPECS, make_layout(((0, 1, 3), 4, 3)), CPU)
    assert cache.caches[2] is cache.caches[0]


def test_a_state_has_one_unit_for_each_sequence() -> None:
    state = CacheField(name="state", shape=(3, 5), dtype=DType.FLOAT32, per="sequence")
    spec = LayerCacheSpec(layer=0, fields=(state,), lifetime=State())
    cache = CacheEngine([spec], make_layout(((0,), 16, 4)), CPU)
    [view] = cache.caches[0].tensors
    assert view.shape[1:] == (3, 5)
    assert view.stride(0) * 4 == 256
    assert cache.geometries[0].block_bytes == 256


def test_fields_of_different_types_do_not_overlap() -> None:
    """Float32 states behind odd numbers of bfloat16 elements (trap 25)."""
    shapes = (((3, 5), DType.BFLOAT16), ((7,), DType.FLOAT32)) * 2
    fields = tuple(
        CacheField(name=f"f{i}", shape=shape, dtype=dtype, per="sequence")
        for i, (shape, dtype) in enumerate(shapes)
    )
    spec = LayerCacheSpec(layer=0, fields=fields, lifetime=State())
    cache = CacheEngine([spec], make_layout(((0,), 16, 4)), CPU)
    places = [
        (view, cache.geometries[0].get_offset(block))
        for block in range(16)
        for view in cache.caches[0].tensors
    ]
    for number, (view, offset) in enumerate(places):
        view[offset] = number
    for number, (view, offset) in enumerate(places):
        assert (view[offset] == number).all()


def test_all_views_reach_the_last_block_and_no_further() -> None:
    cache = CacheEngine(SPECS, make_layout(((0, 1, 3), 4, 3)), CPU)
    views = [view for layer in (0, 1, 3) for view in cache.caches[layer].tensors]
    assert len({view.shape[0] for view in views}) == 1
    units = cache.geometries[0].superblock_units * 5 - cache.geometries[0].block_units
    assert views[0].shape[0] == units + 1
    ends = [(view[-1].storage_offset() + view[-1].numel()) * 2 for view in views]
    assert cache.arena.numel() - 256 < max(ends) <= cache.arena.numel()


def test_memory_is_taken_only_when_written() -> None:
    before = read_resident_bytes()
    arena = allocate_arena(1 << 30, CPU)
    assert int(arena[:4096].sum()) == 0
    assert read_resident_bytes() - before < 64 << 20
    arena[: 128 << 20].fill_(1)
    assert read_resident_bytes() - before > 100 << 20


def read_resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_too_large_an_arena_is_a_clear_error() -> None:
    with pytest.raises(OutOfMemoryError, match="VLLM_CPU_KVCACHE_SPACE"):
        allocate_arena(1 << 62, CPU)
    with pytest.raises(ConfigError, match="beyond"):
        CacheEngine(SPECS, make_layout(((0, 1, 3), 4, 3), num_superblocks=2**31), CPU)


def test_ranks_of_other_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers \[9\]"):
        CacheEngine(SPECS, make_layout(((0, 9), 4, 3)), CPU)


def test_superblocks_are_zeroed_as_the_plan_says() -> None:
    specs = (make_spec(0), make_spec(1, lifetime=Window(tokens=8)))
    cache = CacheEngine(specs, make_layout(((0,), 4, 2), ((1,), 8, 1)), CPU)
    superblock_bytes = cache.geometries[0].superblock_units * 256
    cache.arena.fill_(7)
    cache.prepare_step(make_plan(rows=grow([2], [0])))
    assert (cache.arena == 7).all()
    cache.prepare_step(make_plan(zero_superblocks=[1, 3], rows=grow([6], [1])))
    touched = cache.arena.view(5, superblock_bytes)
    assert not touched[[1, 3]].any()
    assert (touched[[0, 2, 4]] == 7).all()


def test_superblocks_are_zeroed_before_copies_fill_them() -> None:
    cache = CacheEngine(SPECS, make_layout(((0, 1, 3), 4, 3)), CPU)
    geometry = cache.geometries[0]
    cache.arena.fill_(7)
    copy = BlockCopy(group=0, source=1, target=7)
    cache.prepare_step(make_plan(zero_superblocks=[2], copies=[copy]))
    size = geometry.superblock_units * 256
    start, copied = geometry.get_offset(7) * 256, geometry.block_bytes
    assert (cache.arena[start : start + copied] == 7).all()
    assert int(cache.arena[2 * size : 3 * size].sum()) == 7 * copied


def test_copies_move_whole_blocks_of_their_group() -> None:
    cache = CacheEngine(SPECS, make_layout(((0, 1, 3), 4, 3)), CPU)
    geometry = cache.geometries[0]
    cache.arena.copy_(torch.arange(cache.arena.numel()) % 251)
    before = cache.arena.clone()
    cache.prepare_step(make_plan(copies=[BlockCopy(group=0, source=1, target=7)]))
    source, target = (geometry.get_offset(b) * 256 for b in (1, 7))
    size = geometry.block_bytes
    assert torch.equal(cache.arena[target : target + size], before[source : source + size])
    before[target : target + size] = before[source : source + size]
    assert torch.equal(cache.arena, before)


def test_poison_fills_fresh_blocks_and_spares_shared_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_POISON_CACHE", "1")
    cache = CacheEngine(SPECS, make_layout(((0, 1, 3), 4, 3)), CPU)
    view = cache.caches[0].tensors[0]
    assert torch.isnan(view[0]).all()
    cache.arena.zero_()
    new = NewRow(
        seq_id=0,
        branch=0,
        token_ids=[0] * 12,
        num_prompt_tokens=12,
        num_computed_tokens=6,  # one full shared block, and a copied one that is half full
        block_ids=([4, 5, 6],),
        sampling=RowSampling(),
    )
    cache.prepare_step(make_plan(new_rows=[new], rows=grow([9])))
    is_poisoned = [
        bool(torch.isnan(view[cache.geometries[0].get_offset(b)]).all()) for b in (4, 5, 6, 9, 10)
    ]
    assert is_poisoned == [False, False, True, True, False]
