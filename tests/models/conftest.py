"""Models of the table in `families.py`, built once a session; one thread, for they are tiny."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.models.families import make_reference, read_config, save_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Checkpoint:
    """A tiny model: the reference, its normalised config and its tensors by checkpoint name."""

    name: str
    reference: PreTrainedModel
    config: dict[str, Any]
    weights: dict[str, Tensor]


class CheckpointSet:
    """Checkpoints by family name, made on first use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._made: dict[str, Checkpoint] = {}

    def get(self, name: str) -> Checkpoint:
        """Return the checkpoint of a row of `FAMILIES`."""
        if name not in self._made:
            reference = make_reference(name)
            weights = save_weights(reference, self.directory / name)
            self._made[name] = Checkpoint(name, reference, read_config(reference), weights)
        return self._made[name]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> CheckpointSet:
    """The tiny checkpoints of this session."""
    return CheckpointSet(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
