"""Layers with a state over the GPU's ops: the same as over the CPU's, row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.utils.state_layers import STEPS, make_delta_net, make_mamba, make_short_conv, make_step
from tests.utils.states import assert_close
from vllm._custom_ops import state_space as doors
from vllm.model_executor.layers import state as state_layers


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("make", "few_heads"),
    [(make_delta_net, 256), (make_delta_net, 0), (make_mamba, 256), (make_short_conv, 256)],
)
def test_same_as_over_the_cpu_ops(
    make: Callable[[], nn.Module], few_heads: int, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of few and of many heads: with the delta net's norm in its kernel and after it."""
    from vllm._custom_ops.triton import causal_conv, delta_rule, gated_norm, mamba2

    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    layer = make()
    expected_step = make_step(layer, *STEPS[step])
    expected = expected_step.run(layer)
    monkeypatch.setattr(delta_rule, "FEW_HEADS", few_heads)
    monkeypatch.setattr(state_layers, "has_step_ops", lambda tensor: True)
    for module in (causal_conv, delta_rule, gated_norm, mamba2):
        for name, function in module.OPS.items():
            monkeypatch.setattr(doors, name, function)
    actual_step = make_step(layer, *STEPS[step])
    assert_close(actual_step.run(layer), expected, 1e-5)
    for found, wanted in zip(actual_step.memory, expected_step.memory, strict=True):
        assert_close(found, wanted, 1e-5)
