"""ModelRegistry: architecture names to model classes, built in or of others.

Users register their own models here; the loader resolves a checkpoint's `architectures`. Importing
this file imports no torch: a model's module is imported when its class is asked for.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.model_executor.models.table import ARCHITECTURES

if TYPE_CHECKING:
    from torch import nn

logger = init_logger(__name__)

_PLACE = re.compile(r"[\w.]+:\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a model class says about itself, by class attributes of these names."""

    architecture: str
    is_text_generation_model: bool
    is_embedding_model: bool
    supports_multimodal: bool
    supports_pp: bool
    has_inner_state: bool
    is_attention_free: bool


class ModelRegistryTable:
    """A table of architectures. The package's one instance is `ModelRegistry`."""

    def __init__(self, architectures: Mapping[str, str]) -> None:
        self._models: dict[str, str | type[nn.Module]] = dict(architectures)

    def get_supported_archs(self) -> list[str]:
        """Return the known architecture names, sorted."""
        return sorted(self._models)

    def register_model(self, model_arch: str, model_cls: type[nn.Module] | str) -> None:
        """Add a model, or replace one with a warning.

        Args:
            model_arch: name in the checkpoint's `architectures`.
            model_cls: the class, or "module:ClassName", imported when the model is used.

        Raises:
            ValueError: a string of another form.
        """
        if isinstance(model_cls, str) and not _PLACE.fullmatch(model_cls):
            raise ConfigError(
                f"model_cls must be a class or a string 'module:ClassName', got {model_cls!r}"
            )
        if model_arch in self._models:
            logger.warning(
                "architecture %s was registered as %s already; %s replaces it",
                model_arch,
                self._models[model_arch],
                model_cls,
            )
        self._models[model_arch] = model_cls

    def resolve_model_cls(self, architectures: str | Sequence[str]) -> tuple[type[nn.Module], str]:
        """Return the first architecture that is known and can be imported: (class, name).

        Raises:
            ValueError: none is; the message lists what is supported, or why imports failed.
        """
        names = [architectures] if isinstance(architectures, str) else list(architectures)
        self.check_architectures(names)
        failures: list[str] = []
        for name in names:
            place = self._models.get(name)
            if place is None:
                continue
            if not isinstance(place, str):
                return place, name
            module, _, cls = place.partition(":")
            try:
                return getattr(importlib.import_module(module), cls), name
            except (ImportError, AttributeError) as error:
                failures.append(f"{name} ({place}): {error}")
        raise ConfigError("no model class could be imported: " + "; ".join(failures))

    def check_architectures(self, names: Sequence[str]) -> None:
        """Raise ConfigError, listing what is supported, unless a name is known; import nothing."""
        if not names:
            logger.warning("the checkpoint's config names no architectures")
        if not any(name in self._models for name in names):
            raise ConfigError(
                f"model architectures {list(names)} are not supported; supported are "
                f"{', '.join(self.get_supported_archs())}. Others can be added with "
                "ModelRegistry.register_model"
            )

    def inspect_model_cls(self, architectures: str | Sequence[str]) -> ModelInfo:
        """Return what the first loadable architecture says about itself."""
        cls, name = self.resolve_model_cls(architectures)

        def has(flag: str) -> bool:
            return hasattr(cls, flag) and bool(getattr(cls, flag))

        is_embedding = hasattr(cls, "pooler")
        return ModelInfo(
            architecture=name,
            is_text_generation_model=hasattr(cls, "compute_logits") and not is_embedding,
            is_embedding_model=is_embedding,
            supports_multimodal=has("supports_multimodal"),
            supports_pp=has("supports_pp"),
            has_inner_state=has("has_inner_state"),
            is_attention_free=has("is_attention_free"),
        )

    def is_text_generation_model(self, architectures: str | Sequence[str]) -> bool:
        """Whether the model generates text."""
        return self.inspect_model_cls(architectures).is_text_generation_model

    def is_embedding_model(self, architectures: str | Sequence[str]) -> bool:
        """Whether the model pools hidden states instead of generating."""
        return self.inspect_model_cls(architectures).is_embedding_model

    def is_multimodal_model(self, architectures: str | Sequence[str]) -> bool:
        """Whether the model takes more than text."""
        return self.inspect_model_cls(architectures).supports_multimodal

    def is_pp_supported_model(self, architectures: str | Sequence[str]) -> bool:
        """Whether the model can be spread over pipeline stages."""
        return self.inspect_model_cls(architectures).supports_pp

    def model_has_inner_state(self, architectures: str | Sequence[str]) -> bool:
        """Whether the model keeps a state for each sequence."""
        return self.inspect_model_cls(architectures).has_inner_state

    def is_attention_free_model(self, architectures: str | Sequence[str]) -> bool:
        """Whether the model has no attention at all."""
        return self.inspect_model_cls(architectures).is_attention_free


ModelRegistry = ModelRegistryTable(ARCHITECTURES)
