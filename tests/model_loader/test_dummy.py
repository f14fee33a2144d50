"""Dummy weights: the same on every run and split, quickly made, and good for running."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.model_loader.fake_rank import FakeRank
from tests.models.families import FAMILIES, make_reference, read_config
from tests.utils.tiny_engine import LIKE_TRAINED
from vllm.config import DummyConfig
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.layers.weight_place import WeightPlace
from vllm.model_executor.model_loader.dummy import iterate_dummy, make_values
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.weight_map import expand_rows

_SPLIT = ("llama", "qwen2", "gemma3", "mixtral", "qwen2_moe")


def build(name: str, tp: TensorParallel, dtype: torch.dtype = torch.float32) -> CausalLM:
    config = read_config(make_reference(name))
    cls, _ = ModelRegistry.resolve_model_cls(config["architectures"])
    return cls(config, dtype=dtype, tp=tp)


def places_of(model: CausalLM) -> dict[str, WeightPlace]:
    targets = expand_rows(model.weight_rows, model)
    return {name: t.module.place(t.field, t.shard) for name, t in targets.items()}


def iterate(model: CausalLM, config: DummyConfig | None = None) -> Iterator[tuple[str, Tensor]]:
    places, device = places_of(model), torch.device("cpu")
    return iterate_dummy(places, torch.float32, device, config or LIKE_TRAINED)


def make(
    name: str, tp: TensorParallel | None = None, config: DummyConfig | None = None
) -> dict[str, Tensor]:
    return dict(iterate(build(name, tp or TensorParallel.single()), config))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_takes_them_all(name: str) -> None:
    model = build(name, TensorParallel.single())
    report = model.load_weights(iterate(model))
    assert not report.unused and not report.ignored


def test_every_run_gives_the_same() -> None:
    first, second = make("llama"), make("llama")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", _SPLIT)
def test_every_split_gives_the_same(name: str) -> None:
    whole = make(name)
    for rank in range(2):
        part = make(name, FakeRank(rank, 2))
        assert set(part) == set(whole)
        assert all(torch.equal(part[key], whole[key]) for key in whole)


def test_tensors_differ_from_each_other() -> None:
    tensors = [t for t in make("llama").values() if t.dim() == 2]
    for i, first in enumerate(tensors):
        assert first.std() == pytest.approx(0.02, rel=0.05)
        assert len({tuple(row[:4].tolist()) for row in first}) == len(first)
        for second in tensors[i + 1 :]:
            size = min(first.numel(), second.numel())
            assert not torch.equal(first.flatten()[:size], second.flatten()[:size])


@pytest.mark.parametrize(("name", "value"), [("llama", 1.0), ("gemma2", 0.0)])
def test_norms_do_nothing(name: str, value: float) -> None:
    for key, tensor in make(name).items():
        if "norm" in key:
            assert torch.equal(tensor, torch.full_like(tensor, value)), key


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_moe"])
def test_all_tensors_alike(name: str) -> None:
    """What is promised where nothing is asked: one seed, one range, norms too."""
    made = make(name, config=DummyConfig())
    block = max(made.values(), key=Tensor.numel).flatten()
    assert any("norm" in key for key in made)
    for key, tensor in made.items():
        assert 0 < tensor.abs().max() <= 1e-3, key
        assert tensor.std() == pytest.approx(1e-3 / 3**0.5, rel=0.3), key
        assert torch.equal(tensor.flatten(), block[: tensor.numel()]), key


def test_a_large_tensor_takes_a_moment() -> None:
    block = torch.empty(1_048_573, dtype=torch.bfloat16).uniform_(-1, 1)
    started = time.perf_counter()
    values = make_values((152064, 896), block, 77)
    assert time.perf_counter() - started < 3.0  # 0.05 s when nothing else runs; a 7B model has 50
    assert values[0].float().std() > 0.5 and not torch.equal(values[0], values[1])
