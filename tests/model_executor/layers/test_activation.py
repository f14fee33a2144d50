"""Activation modules against transformers' functions of the same names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm.errors import ConfigError
from vllm.model_executor.layers.activation import (
    GATED_ACTIVATIONS,
    GeluAndMul,
    SiluAndMul,
    get_act_fn,
    make_gated_activation,
    resolve_gated_activation,
)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 3


def reference(name: str, x: Tensor) -> Tensor:
    from transformers.activations import ACT2FN

    return ACT2FN[name](x)


@pytest.mark.parametrize("name", [name for name in GATED_ACTIVATIONS if name != "swish"])
def test_gated_activations(name: str) -> None:
    x = random(5, 48)
    gate, up = x.chunk(2, dim=-1)
    module = make_gated_activation(resolve_gated_activation(name))
    torch.testing.assert_close(module(x), reference(name, gate) * up, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["relu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu"]
)
def test_plain_activations(name: str) -> None:
    x = random(5, 48)
    torch.testing.assert_close(get_act_fn(name)(x), reference(name, x), rtol=1e-5, atol=1e-5)


def test_names_of_0_6_3() -> None:
    x = random(2, 8)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(SiluAndMul()(x), reference("silu", gate) * up)
    torch.testing.assert_close(GeluAndMul()(x), reference("gelu", gate) * up)
    tanh = GeluAndMul(approximate="tanh")(x)
    torch.testing.assert_close(tanh, reference("gelu_pytorch_tanh", gate) * up)


def test_unknown_names_say_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"'sine' is not supported.*silu, swish"):
        resolve_gated_activation("sine")
    with pytest.raises(ConfigError, match="'sine' is not supported; allowed: relu"):
        get_act_fn("sine")
    with pytest.raises(ConfigError, match="'none' or 'tanh'"):
        GeluAndMul(approximate="sine")
