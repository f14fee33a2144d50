"""Layers with a state on a GPU: the same as on a CPU, and captured into a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests._custom_ops.gpu.graphs import capture
from tests._custom_ops.gpu.tensors import NEEDS_GPU
from tests.utils.state_layers import STEPS, make_delta_net, make_mamba, make_short_conv, make_step
from tests.utils.states import assert_close
from vllm._custom_ops.library import load_extension
from vllm._custom_ops.triton.table import register_triton_ops

pytestmark = NEEDS_GPU

LAYERS = [make_delta_net, make_mamba, make_short_conv]


@pytest.fixture(autouse=True)
def _ops() -> None:
    load_extension()
    register_triton_ops()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("make", LAYERS)
def test_same_as_on_a_cpu(make: Callable[[], nn.Module], step: str) -> None:
    layer = make()
    expected_step = make_step(layer, *STEPS[step])
    expected = expected_step.run(layer)
    layer = layer.cuda()
    actual_step = make_step(layer, *STEPS[step], "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = actual_step.run(layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(actual.cpu(), expected, 1e-3)
    for found, wanted in zip(actual_step.memory, expected_step.memory, strict=True):
        assert_close(found.cpu(), wanted, 1e-3)


@pytest.mark.parametrize("make", LAYERS)
def test_replay_equals_the_step(make: Callable[[], nn.Module]) -> None:
    layer = make().cuda()
    eager = make_step(layer, *STEPS["decode"], "cuda")
    expected = eager.run(layer)
    step = make_step(layer, *STEPS["decode"], "cuda")
    start = [memory.clone() for memory in step.memory]
    outputs = []
    graph = capture(lambda: outputs.append(step.run(layer)))
    for memory, before in zip(step.memory, start, strict=True):
        memory.copy_(before)
    graph.replay()
    assert_close(outputs[-1], expected, 1e-6)
    for found, wanted in zip(step.memory, eager.memory, strict=True):
        assert_close(found, wanted, 1e-6)
