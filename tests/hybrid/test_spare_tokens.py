"""Layers with a state leave nothing that memory held before to tokens behind those of the last row.

Only steps on a GPU have such tokens; naive twins stand in for its ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.utils.state_layers import STEPS, make_delta_net, make_mamba, make_short_conv, make_step
from vllm._custom_ops.naive import state_space
from vllm.model_executor.layers import linear_attention, mamba, state

NUM_SPARE = 3


@pytest.fixture(autouse=True)
def _use_naive_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear_attention, mamba, state):
        monkeypatch.setattr(module, "state_ops", state_space)
    monkeypatch.setattr(state, "has_step_ops", lambda tensor: True)


@pytest.fixture(autouse=True)
def _new_memory_is_nan() -> Iterator[None]:
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(was_deterministic)


@pytest.mark.parametrize("step", ["mixed", "prompt"])
@pytest.mark.parametrize("make", [make_delta_net, make_mamba, make_short_conv])
def test_spare_tokens_add_nothing(make: Callable[[], nn.Module], step: str) -> None:
    layer = make()
    expected = make_step(layer, *STEPS[step])
    padded = make_step(layer, *STEPS[step])
    padded = replace(
        padded,
        x=torch.cat((padded.x, padded.x[:NUM_SPARE])),
        batch=replace(padded.batch, has_spare_tokens=True),
    )
    found, own = padded.run(layer), expected.run(layer)
    torch.testing.assert_close(found[:-NUM_SPARE], own)
    nothing = torch.zeros(NUM_SPARE, layer.out_proj.input_size)
    assert torch.equal(found[-NUM_SPARE:], layer.out_proj(nothing))
    for memory, wanted in zip(padded.memory, expected.memory, strict=True):
        torch.testing.assert_close(memory, wanted, equal_nan=True)
