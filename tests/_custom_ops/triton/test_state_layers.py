"""Layers with a state over the GPU's ops: the same as over the CPU's, row by row."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import pad

from tests.utils.state_layers import (
    STEPS,
    LayerStep,
    make_delta_net,
    make_mamba,
    make_short_conv,
    make_step,
)
from tests.utils.states import assert_close
from vllm._custom_ops import state_space as doors
from vllm.errors import ShapeError
from vllm.model_executor.layers import state as state_layers


def interpret_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers run over the GPU's ops."""
    from vllm._custom_ops.triton import causal_conv, delta_rule, gated_norm, mamba2

    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    monkeypatch.setattr(state_layers, "has_step_ops", lambda tensor: True)
    for module in (causal_conv, delta_rule, gated_norm, mamba2):
        for name, function in module.OPS.items():
            monkeypatch.setattr(doors, name, function)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("make", [make_delta_net, make_mamba, make_short_conv])
def test_same_as_over_the_cpu_ops(
    make: Callable[[], nn.Module], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make()
    expected_step = make_step(layer, *STEPS[step])
    expected = expected_step.run(layer)
    interpret_ops(monkeypatch)
    actual_step = make_step(layer, *STEPS[step])
    assert_close(actual_step.run(layer), expected, 1e-5)
    for found, wanted in zip(actual_step.memory, expected_step.memory, strict=True):
        assert_close(found, wanted, 1e-5)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("make", [make_delta_net, make_mamba, make_short_conv])
def test_tokens_without_rows_and_rows_without_tokens(
    make: Callable[[], nn.Module], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fill up what a graph of prompts has room for, and change nothing."""
    layer = make()
    expected_step = make_step(layer, *STEPS[step])
    expected = expected_step.run(layer)
    interpret_ops(monkeypatch)
    padded = pad_step(make_step(layer, *STEPS[step]), num_tokens=9, num_rows=3)
    assert_close(padded.run(layer)[: len(expected)], expected, 1e-5)
    for found, wanted in zip(padded.memory, expected_step.memory, strict=True):
        assert_close(found, wanted, 1e-5)


def pad_step(step: LayerStep, *, num_tokens: int, num_rows: int) -> LayerStep:
    """Return the step as a graph sees it: how many of its rows have one token is not said."""
    batch, group = step.batch, step.batch.groups[0]
    padded = replace(
        batch,
        cu_query_lens=torch.cat((batch.cu_query_lens, batch.cu_query_lens[-1:].repeat(num_rows))),
        seq_lens=pad(batch.seq_lens, (0, num_rows)),
        groups=(replace(group, block_offsets=pad(group.block_offsets, (0, 0, 0, num_rows))),),
        max_query_len=len(step.x) + num_tokens,
        num_decode_rows=0,
    )
    x = pad(step.x, (0, 0, 0, num_tokens), value=float("nan"))
    return LayerStep(x=x, batch=padded, states=step.states)


@pytest.mark.parametrize("make", [make_delta_net, make_mamba])
@pytest.mark.parametrize("part", ["out", "gate", "conv_state"])
def test_heads_apart_are_a_clear_error(
    make: Callable[[], nn.Module], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels would read and write the wrong elements."""
    layer = make()
    interpret_ops(monkeypatch)
    op = "gated_delta_step" if make is make_delta_net else "mamba2_step"
    run_op = getattr(doors, op)

    def spread(*given: Any) -> None:
        arguments = inspect.signature(run_op).bind(*given).arguments
        name = next(key for key in arguments if key.startswith(part))
        x = arguments[name]
        arguments[name] = torch.stack((x, x), -1)[..., 0]
        run_op(*arguments.values())

    monkeypatch.setattr(doors, op, spread)
    step = make_step(layer, *STEPS["decode"])
    before = [memory.clone() for memory in step.memory]
    with pytest.raises(ShapeError, match=f"_step: .*{part}.*strides"):
        step.run(layer)
    for memory, untouched in zip(step.memory, before, strict=True):
        torch.testing.assert_close(memory, untouched, rtol=0, atol=0, equal_nan=True)
