"""The model: which files, which architecture, which limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.config.parallel import ParallelConfig
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

    @property
    def hf_text_config(self) -> Mapping[str, Any]:
        """The checkpoint's config; text parts are lifted to the top already."""
        return self.hf_config

    @property
    def served_model_name(self) -> str:
        """The name that responses carry."""
        return self.served_model_names[0] if self.served_model_names else self.model

    @property
    def embedding_mode(self) -> bool:
        """Whether the model makes embeddings: no such model is served."""
        return False

    @property
    def quantization(self) -> str | None:
        """Quantisation of the weights in memory: none, they are dequantised while loading."""
        return None

    def get_vocab_size(self) -> int:
        """Return the rows of the embedding."""
        return self.vocab_size

    def get_hidden_size(self) -> int:
        """Return the width of the hidden state."""
        return int(self.hf_config["hidden_size"])

    def get_head_size(self) -> int:
        """Return the size of an attention head."""
        head_dim = self.hf_config.get("head_dim")
        return int(head_dim or self.get_hidden_size() // self.hf_config["num_attention_heads"])

    def get_sliding_window(self) -> int | None:
        """Return the window that the config names, whichever layers it is for."""
        window = self.hf_config.get("sliding_window")
        return None if window is None else int(window)

    def get_total_num_kv_heads(self) -> int:
        """Return the key and value heads of the whole model."""
        heads = self.hf_config["num_attention_heads"]
        return int(self.hf_config.get("num_key_value_heads") or heads)

    def get_num_kv_heads(self, parallel: ParallelConfig) -> int:
        """Return the key and value heads of one rank; replicated when there are too few."""
        return max(1, self.get_total_num_kv_heads() // parallel.tensor_parallel_size)

    def get_num_attention_heads(self, parallel: ParallelConfig) -> int:
        """Return the query heads of one rank."""
        return int(self.hf_config["num_attention_heads"]) // parallel.tensor_parallel_size

    def get_num_layers(self, parallel: ParallelConfig) -> int:
        """Return the decoder layers of one stage."""
        return self.num_layers // parallel.pipeline_parallel_size
