"""Gemma 3, text: Gemma 2 with head norms, no attention caps, a rotary base for each layer type.

Row of `models/table.py`. A layer that `layer_types` calls full never gets the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.config_reader import read_window
from vllm.model_executor.models.gemma2 import make_gemma_shape
from vllm.model_executor.models.shapes import AttentionShape, ModelShape
from vllm.model_executor.models.weight_rows import (
    ATTENTION_ROWS,
    MLP_ROWS,
    OUTER_ROWS,
    SANDWICH_NORM_ROWS,
)


class Gemma3ForCausalLM(CausalLM):
    """Gemma 3 (gemma3_text)."""

    weight_rows = OUTER_ROWS + ATTENTION_ROWS + SANDWICH_NORM_ROWS + MLP_ROWS
    ignored_weights = (
        *CausalLM.ignored_weights,
        (
            r"(model\.)?(vision_tower|multi_modal_projector)\..*",
            "the text part of the model is served, not the images",
        ),
    )
    weight_renames = (
        (r"(?:language_model\.model|model\.language_model)\.(.*)", r"model.\1"),
        (r"language_model\.(lm_head\..*)", r"\1"),
    )

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""
        bias = bool(config["attention_bias"])

        def read_attention(own: Mapping[str, Any], layer: int) -> AttentionShape:
            # attn_logit_softcapping is in the config, but the model's definition does not use it.
            return AttentionShape(
                num_heads=own["num_attention_heads"],
                num_kv_heads=own["num_key_value_heads"],
                head_size=own["head_dim"],
                scale=own["query_pre_attn_scalar"] ** -0.5,
                rope=own["rope_parameters"][config["layer_types"][layer]],
                qkv_bias=bias,
                out_bias=bias,
                has_qk_norm=True,
                window=read_window(config, layer),
            )

        return make_gemma_shape(config, read_attention, has_post_norms=True)
