"""A new attention kernel is one file and one row: nothing else knows its name."""

from __future__ import annotations

import sys
import types

import pytest

from tests.utils.toy_model import ToyDriver, ToyModel
from vllm.attention.backends import table
from vllm.attention.backends.table import KERNELS, KernelRow
from vllm.attention.backends.torch_sdpa import TorchBackend
from vllm.attention.selector import resolve_kernels


class ToyBackend(TorchBackend):
    """Counts what it is asked."""

    name = "toy"
    num_plans = 0
    num_layers = 0

    def plan(self, batch, group):
        type(self).num_plans += 1
        return super().plan(batch, group)

    def forward(self, *arguments, **options):
        type(self).num_layers += 1
        super().forward(*arguments, **options)


@pytest.fixture
def toy_kernel(monkeypatch: pytest.MonkeyPatch):
    file = types.ModuleType("toy_attention")
    file.ToyBackend = ToyBackend
    monkeypatch.setitem(sys.modules, "toy_attention", file)
    row = KernelRow(
        name="toy", module="toy_attention:ToyBackend", devices=("cpu",), rank=(("cpu", -1),)
    )
    monkeypatch.setitem(KERNELS, "toy", row)
    monkeypatch.setattr(ToyBackend, "num_plans", 0)
    monkeypatch.setattr(ToyBackend, "num_layers", 0)
    yield
    table.load_backend.cache_clear()


@pytest.mark.usefixtures("toy_kernel")
def test_a_row_is_all_that_a_kernel_needs() -> None:
    model = ToyModel(windows=(0, 5, 0))
    queries = {i: layer.query for i, layer in model.attention_layers().items()}
    assert {c.kernel for c in resolve_kernels(queries, {}).values()} == {"toy"}
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    driver = ToyDriver(model, kernel="toy")
    ToyBackend.num_layers = 0  # what the probe ran does not count
    ToyBackend.num_plans = 0
    seq = driver.add(prompt)
    driver.run([seq], 4)
    assert seq.output_ids == model.reference_greedy(prompt, 4)
    assert ToyBackend.num_plans == 4, "metadata is made once a step"
    assert ToyBackend.num_layers == 4 * 3
