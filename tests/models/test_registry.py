"""ModelRegistry: built-in names, models of others, errors, laziness."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.registry import ModelRegistryTable
from vllm.model_executor.models.table import ARCHITECTURES


class Toy(nn.Module):
    """A model of others, with a flag of its own."""

    supports_pp = True

    def compute_logits(self) -> None:
        """Marks a text generation model."""


@pytest.fixture
def registry() -> ModelRegistryTable:
    return ModelRegistryTable(ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_row_resolves_and_says_what_it_is(name: str) -> None:
    cls, found = ModelRegistry.resolve_model_cls(name)
    assert found == name and issubclass(cls, nn.Module)
    assert ModelRegistry.is_text_generation_model(name)
    assert not ModelRegistry.is_embedding_model(name)
    assert not ModelRegistry.is_multimodal_model([name])
    assert not ModelRegistry.is_pp_supported_model([name])
    assert ModelRegistry.model_has_inner_state([name]) == getattr(cls, "has_inner_state", False)
    assert not ModelRegistry.is_attention_free_model([name])


def test_supported_names_are_listed() -> None:
    assert {"LlamaForCausalLM", "Gemma3ForCausalLM"} <= set(ModelRegistry.get_supported_archs())


def test_the_first_known_name_wins() -> None:
    cls, name = ModelRegistry.resolve_model_cls(["Unknown", "Qwen3ForCausalLM", "LlamaForCausalLM"])
    assert (cls.__name__, name) == ("Qwen3ForCausalLM", "Qwen3ForCausalLM")


@pytest.mark.parametrize("names", ["Unknown", ["Unknown"], []])
def test_unknown_names_list_what_is_supported(names: list[str] | str) -> None:
    with pytest.raises(ValueError, match=r"not supported.*LlamaForCausalLM"):
        ModelRegistry.resolve_model_cls(names)


def test_a_class_can_be_registered(registry: ModelRegistryTable) -> None:
    registry.register_model("ToyForCausalLM", Toy)
    assert registry.resolve_model_cls("ToyForCausalLM") == (Toy, "ToyForCausalLM")
    assert registry.is_pp_supported_model("ToyForCausalLM")
    assert "ToyForCausalLM" in registry.get_supported_archs()
    assert "ToyForCausalLM" not in ModelRegistry.get_supported_archs()


def test_a_string_is_imported_when_it_is_used(
    registry: ModelRegistryTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_toy_model.py").write_text(
        "from torch import nn\nclass Lazy(nn.Module): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry.register_model("Lazy", "lazy_toy_model:Lazy")
    assert "lazy_toy_model" not in sys.modules
    cls, _ = registry.resolve_model_cls("Lazy")
    assert cls.__name__ == "Lazy"


@pytest.mark.parametrize("place", ["module.Class", "module:", ":Class", "a:b:c", ""])
def test_a_string_of_another_form_is_refused(registry: ModelRegistryTable, place: str) -> None:
    with pytest.raises(ValueError, match="module:ClassName"):
        registry.register_model("Toy", place)


def test_replacing_warns(registry: ModelRegistryTable, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(
        "vllm.model_executor.models.registry.logger.warning",
        lambda text, *values: warnings.append(text % values),
    )
    registry.register_model("ToyForCausalLM", Toy)
    assert not warnings
    registry.register_model("LlamaForCausalLM", Toy)
    assert len(warnings) == 1 and "LlamaForCausalLM" in warnings[0]
    assert registry.resolve_model_cls("LlamaForCausalLM")[0] is Toy


def test_an_import_that_fails_says_why(registry: ModelRegistryTable) -> None:
    registry.register_model("Broken", "no_such_module_here:Model")
    with pytest.raises(ValueError, match="no_such_module_here"):
        registry.resolve_model_cls("Broken")
    assert registry.resolve_model_cls(["Broken", "LlamaForCausalLM"])[1] == "LlamaForCausalLM"


def test_importing_the_registry_imports_no_torch() -> None:
    code = "import sys, vllm.model_executor.models as m; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
