"""The model: which files, which architecture, which limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.types import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model, fully resolved.

    Attributes:
        model: directory, GGUF file or hub id as given.
        tokenizer: same, for the tokenizer.
        tokenizer_mode: "auto" or "slow".
        dtype: element type of weights and activations.
        hf_config: the checkpoint's config.json as a plain dict (made from the metadata for a GGUF
            file); nested text configs are already lifted to the top.
        generation_config: generation_config.json as a plain dict, or empty.
        max_model_len: most tokens of one sequence, prompt and output together.
        served_model_names: names accepted in requests; the first is returned.
        max_logprobs: upper bound of `logprobs` and `prompt_logprobs`.
    """

    model: str
    tokenizer: str
    tokenizer_mode: str = "auto"
    trust_remote_code: bool = False
    skip_tokenizer_init: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None
    dtype: DType = DType.BFLOAT16
    seed: int = 0
    hf_config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    max_model_len: int
    served_model_names: tuple[str, ...] = ()
    max_logprobs: int = 20
    enforce_eager: bool = False

    @property
    def architectures(self) -> tuple[str, ...]:
        """Class names that the checkpoint asks for, first match wins."""
        return tuple(self.hf_config.get("architectures") or ())

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, as the checkpoint says (no padding)."""
        return int(self.hf_config["vocab_size"])

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.hf_config["num_hidden_layers"])
