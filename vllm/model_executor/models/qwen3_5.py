"""Qwen3.5, text: Qwen3-Next with projections in tensors of their own, dense or with experts.

Rows of `models/table.py`. Of a checkpoint with a vision tower the text part is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.qwen3_next import (
    DELTA_NET_ROWS,
    DRAFT_LAYERS,
    make_qwen3_next_shape,
)
from vllm.model_executor.models.shapes import ModelShape
from vllm.model_executor.models.weight_rows import (
    ATTENTION_ROWS,
    EXPERT_ROWS,
    MLP_ROWS,
    OUTER_ROWS,
    PRE_NORM_ROWS,
    layer_row,
)

_PROJECTION_ROWS = tuple(
    layer_row(f"linear_attn.in_proj_{part}", "attention.in_proj", part)
    for part in ("qkv", "z", "b", "a")
)


class Qwen3_5ForCausalLM(CausalLM):
    """Qwen3.5, dense."""

    has_inner_state = True
    weight_rows = (
        *OUTER_ROWS,
        *PRE_NORM_ROWS,
        *ATTENTION_ROWS,
        *MLP_ROWS,
        *DELTA_NET_ROWS,
        *_PROJECTION_ROWS,
    )
    ignored_weights = (
        *CausalLM.ignored_weights,
        *DRAFT_LAYERS,
        (r"model\.visual\..*", "the text part of the model is served, not the images"),
    )
    weight_renames = ((r"model\.language_model\.(.*)", r"model.\1"),)

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""
        return make_qwen3_next_shape(config, is_interleaved=False)


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3.5 with experts."""

    weight_rows = (*Qwen3_5ForCausalLM.weight_rows, *EXPERT_ROWS)
