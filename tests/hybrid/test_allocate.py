"""The cache by layer type: `allocate_hybrid`, states in the arena and in the batch."""

from __future__ import annotations

import pytest
import torch

from vllm.cache_spec import (
    CacheField,
    CacheLayout,
    Full,
    GroupLayout,
    LayerCacheSpec,
    Lifetime,
    State,
    Window,
)
from vllm.config.hybrid import HybridSettings, LayerPolicy
from vllm.errors import ConfigError
from vllm.hybrid.apply import name_specs
from vllm.hybrid.grouping import group_layers
from vllm.step import NewRow, PlanRow, RowSampling, StepPlan
from vllm.types import DType
from vllm.worker.cache_engine import CacheEngine
from vllm.worker.hybrid_cache import count_hybrid_bytes
from vllm.worker.input_batch import InputBatch

CPU = torch.device("cpu")


def make_rows(layer: int, kind: str, lifetime: Lifetime, heads: int = 2) -> LayerCacheSpec:
    fields = tuple(CacheField(name=n, shape=(heads, 32), dtype=DType.BFLOAT16) for n in "kv")
    return LayerCacheSpec(layer=layer, fields=fields, lifetime=lifetime, kind=kind)


def make_state(layer: int) -> LayerCacheSpec:
    fields = (
        CacheField(name="state", shape=(2, 16, 8), dtype=DType.FLOAT32, per="sequence"),
        CacheField(name="conv", shape=(3, 32), dtype=DType.BFLOAT16, per="sequence"),
    )
    return LayerCacheSpec(layer=layer, fields=fields, lifetime=State(), kind="state")


SPECS = (
    make_rows(0, "full", Full()),
    make_rows(1, "flash3", Window(tokens=20)),
    make_rows(2, "flash3", Window(tokens=20)),
    make_state(3),
)


def make_engine(num_superblocks: int = 8) -> CacheEngine:
    groups = group_layers(SPECS, HybridSettings(), 16)
    layout = CacheLayout(
        groups=tuple(
            GroupLayout(
                name=g.name, layers=g.layers, block_tokens=g.block_tokens, blocks_per_superblock=2
            )
            for g in groups
        ),
        num_superblocks=num_superblocks,
    )
    return CacheEngine(
        SPECS, layout, CPU, kernel_block_tokens=(8, 16, 32), uncached_types=("dense_head",)
    )


def test_each_type_gets_its_group() -> None:
    engine = make_engine()
    arena = engine.arena
    found = engine.allocate_hybrid({"full": 16, "flash3": 16, "dense_head": 0})
    assert engine.arena is arena, "nothing changes where the sizes are what they were"
    assert {kind: (c.block_tokens, c.num_blocks) for kind, c in found.items()} == {
        "full": (16, 16), "flash3": (16, 16), "state": (16, 16), "dense_head": (0, 0),
    }  # fmt: skip
    assert {kind: sorted(c.views) for kind, c in found.items()} == {
        "full": [0], "flash3": [1, 2], "state": [3], "dense_head": [],
    }  # fmt: skip
    assert found["flash3"].views[1][0].shape[1:] == (16, 2, 32)
    assert found["state"].views[3][0].shape[1:] == (2, 16, 8)


def test_other_sizes_cut_the_arena_anew() -> None:
    engine = make_engine()
    found = engine.allocate_hybrid({"full": 32, "flash3": 8})
    assert found["full"].views[0][0].shape[1:] == (32, 2, 32)
    assert found["flash3"].views[2][1].shape[1:] == (8, 2, 32)
    assert found["full"].num_blocks > 0
    last = engine.geometries[0].get_offset(found["full"].num_blocks - 1)
    found["full"].views[0][1][last].fill_(1.0)
    assert [g.block_tokens for g in engine.groups] == [32, 8, 16]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ful": 16}, "layer type 'ful', which this model does not have; its types are"),
        ({"flash3": 24}, r"'flash3' \(layers \[1, 2\]\) blocks of 24 tokens; .* take 8, 16, 32"),
        ({"flash3": -8}, "blocks of -8 tokens"),
        ({"full": 0}, r"gives layer type 'full' no cache, but its layers \[0\] keep one"),
        ({"state": 0}, r"its layers \[3\] keep one"),
    ],
)
def test_wrong_maps(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine().allocate_hybrid(sizes)


def make_plan(computed: int = 0) -> StepPlan:
    return StepPlan(
        step=0,
        new_rows=[
            NewRow(
                seq_id=4, branch=0, token_ids=list(range(40)), num_prompt_tokens=40,
                num_computed_tokens=computed, block_ids=([0, 1, 2], [-1, 0, 1], [3]),
                sampling=RowSampling(),
            )
        ],
        rows=[
            PlanRow(
                seq_id=4, num_computed_tokens=computed, num_new_tokens=40 - computed,
                new_block_ids=(),
            )
        ],
    )  # fmt: skip


def test_states_have_one_block_and_no_rows() -> None:
    engine = make_engine()
    batch = InputBatch(2, 64, engine.geometries, CPU)
    step = batch.apply(make_plan())
    assert step is not None
    full, window, state = step.batch.groups
    assert state.block_offsets.tolist() == [[engine.geometries[2].get_offset(3)]]
    assert state.slots.shape == (0, 2)
    assert full.block_offsets.shape == (1, 3)
    assert window.block_offsets[0, 0] == engine.geometries[1].pad_offset
    assert (window.slots[:16, 0] == -1).all(), "tokens without a block are not stored"
    assert (window.slots[16:, 0] >= 0).all()


def test_groups_of_one_type_have_names_of_their_own() -> None:
    specs = (
        make_rows(0, "mixed", Full()),
        make_rows(1, "mixed", Window(tokens=8)),
        make_rows(2, "own", Full()),
    )
    groups = group_layers(specs, HybridSettings(), 16)
    assert [(g.name, g.layers) for g in groups] == [
        ("mixed.full", (0,)), ("mixed.window_8", (1,)), ("own", (2,)),
    ]  # fmt: skip


def test_vanilla_is_one_group_whatever_the_names() -> None:
    specs = (make_rows(0, "a", Full()), make_rows(1, "b", Full()))
    (group,) = group_layers(specs, HybridSettings(is_vanilla=True), 16)
    assert (group.name, group.layers) == ("full", (0, 1))
    with pytest.raises(ConfigError, match=r"the layers \[1, 2, 3\] do not"):
        group_layers(SPECS, HybridSettings(is_vanilla=True), 16)


def test_a_size_that_no_kernel_takes_names_the_layers() -> None:
    policies = tuple(
        LayerPolicy(layer=s.layer, kind=s.kind, lifetime=s.lifetime, block_tokens=24) for s in SPECS
    )
    with pytest.raises(ConfigError, match=r"'full' \(layers \[0\]\) is given blocks of 24 tokens"):
        group_layers(SPECS, HybridSettings(policies=policies), 16, (8, 16))


def test_what_a_layer_computes_with_cannot_be_renamed_away() -> None:
    policies = tuple(LayerPolicy(layer=i, kind="x", lifetime=Full()) for i in range(4))
    with pytest.raises(ConfigError, match=r"layer 1 .* keeps window_20, which cannot be made full"):
        name_specs(SPECS, policies)


def test_memory_is_sized_by_what_each_group_keeps() -> None:
    def count(max_model_len: int, *specs: LayerCacheSpec) -> int:
        return count_hybrid_bytes(
            group_layers(specs, HybridSettings(), 16),
            max_num_seqs=4, max_model_len=max_model_len, max_num_batched_tokens=64,
        )  # fmt: skip

    assert count(4096, SPECS[3]) == count(512, SPECS[3]) > 8 * SPECS[3].sequence_bytes
    assert count(4096, SPECS[1]) == count(512, SPECS[1])
    full = 4 * 4096 * SPECS[0].token_bytes
    assert full < count(4096, SPECS[0]) < 1.1 * full
