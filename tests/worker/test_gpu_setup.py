"""What a rank on a GPU prepares for, as far as it can be said without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.utils.tiny_models import TinyModels
from vllm import EngineArgs
from vllm.config import EngineConfig
from vllm.errors import KernelError
from vllm.worker.layer_setup import LayerSetup
from vllm.worker.report import LayerKernel


def make_layers(*kernels: str) -> LayerSetup:
    return LayerSetup(kernels=tuple(LayerKernel(layer=i, kernel=k) for i, k in enumerate(kernels)))


@pytest.fixture
def config(tiny_models: TinyModels) -> EngineConfig:
    """The config of a tiny model."""
    model = str(tiny_models.loop())
    return EngineArgs(model=model, device="cpu", skip_tokenizer_init=True).create_engine_config()


def test_graphs_need_kernels_that_never_wait(config: EngineConfig) -> None:
    from vllm.worker.gpu_setup import read_limits

    assert read_limits(config, make_layers("triton", "flashattn")).has_graphs
    assert not read_limits(config, make_layers("triton", "torch")).has_graphs
    eager = replace(config, model_config=replace(config.model_config, enforce_eager=True))
    assert not read_limits(eager, make_layers("triton")).has_graphs


def test_steps_are_padded_with_graphs_and_without(config: EngineConfig) -> None:
    """Or their products would not have the same bits."""
    from vllm.worker.gpu_setup import read_limits

    eager = replace(config, model_config=replace(config.model_config, enforce_eager=True))
    for kernels in (("triton",), ("triton", "flashattn"), ("torch",), ()):
        layers = make_layers(*kernels)
        limits = read_limits(config, layers)
        assert replace(read_limits(eager, layers), has_graphs=limits.has_graphs) == limits
        assert limits.pads_decodes == limits.has_graphs == ("torch" not in kernels)
        assert limits.pads_prompts == (kernels in (("triton",), ()))


def test_a_missing_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm._custom_ops.triton import table

    def import_module(name: str) -> Any:
        assert name == "triton"
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(table.importlib, "import_module", import_module)
    with pytest.raises(KernelError, match=r"a GPU needs Triton.*No module named"):
        table.register_triton_ops()
