"""Gemma 1: Llama with (1 + w) norms, a tanh GELU and scaled embeddings.

Row of `models/table.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.config_reader import read_attention
from vllm.model_executor.models.gemma2 import make_gemma_shape
from vllm.model_executor.models.shapes import AttentionShape, ModelShape
from vllm.model_executor.models.weight_rows import LLAMA_ROWS


class GemmaForCausalLM(CausalLM):
    """Gemma 1."""

    weight_rows = LLAMA_ROWS

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""
        bias = bool(config["attention_bias"])

        def read(own: Mapping[str, Any], layer: int) -> AttentionShape:
            return read_attention(own, window=0, qkv_bias=bias, out_bias=bias)

        return make_gemma_shape(config, read, has_post_norms=False)
