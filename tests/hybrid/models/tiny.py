"""Tiny random checkpoints of hybrid families: transformers' model, and ours read from its files.

Each is saved and read back through `get_config`, as the engine does it, so that names of tensors
and defaults of config.json are tested too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.utils.fixtures_models import build_model
from vllm.transformers_utils.config import get_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE: Mapping[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class TinyRow:
    """One checkpoint.

    Attributes:
        model_type: transformers' name.
        config: its config.
        prompt_lens: prompts of the tests, longer than windows and chunks.
    """

    model_type: str
    config: Mapping[str, Any]
    prompt_lens: tuple[int, ...] = (1, 17, 40, 90)


@dataclass(frozen=True, kw_only=True)
class TinyCheckpoint:
    """The reference, its config as the engine reads it, and its tensors by checkpoint name."""

    reference: PreTrainedModel
    config: dict[str, Any]
    weights: dict[str, Tensor]
    directory: Path


def make_checkpoint(row: TinyRow, directory: Path) -> TinyCheckpoint:
    """Build the transformers model of a row with random parameters, save it and read it back."""
    reference = build_model(row.model_type, row.config)
    randomize(reference)
    reference.save_pretrained(directory)
    return TinyCheckpoint(
        reference=reference,
        config=get_config(str(directory)),
        weights=load_file(directory / "model.safetensors"),
        directory=directory,
    )


def randomize(model: PreTrainedModel, seed: int = 0) -> None:
    """Add N(0, 0.1) to the neutral value of every parameter.

    That is 0, and for norms what transformers starts them with: 1, or 0 where the norm adds 1
    itself.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            is_norm = "norm" in name.rsplit(".", 2)[-2] and parameter.dim() == 1
            parameter.copy_(parameter + noise if is_norm else noise)
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
