"""Bamba: Mamba-2 with attention in a few layers, a gated MLP in every layer.

Row of `models/table.py`. Rotary positions turn a part of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.config_reader import read_attention, read_mlp
from vllm.model_executor.models.shapes import LayerShape, ModelShape
from vllm.model_executor.models.state_parts import read_mamba2
from vllm.model_executor.models.weight_map import WeightRow
from vllm.model_executor.models.weight_rows import ATTENTION_ROWS, layer_row

MAMBA_ROWS = (
    layer_row("mamba", "attention.heads"),
    layer_row("mamba.conv1d", "attention.conv"),
    layer_row("mamba.norm", "attention.norm"),
    layer_row("mamba.in_proj", "attention.in_proj"),
    layer_row("mamba.out_proj", "attention.out_proj"),
)
"""What Bamba and Granite 4 name alike."""


class BambaForCausalLM(CausalLM):
    """Bamba."""

    has_inner_state = True
    weight_rows = (
        WeightRow(source="model.embed_tokens", target="embed"),
        WeightRow(source="model.final_layernorm", target="norm"),
        WeightRow(source="lm_head", target="lm_head"),
        *ATTENTION_ROWS,
        *MAMBA_ROWS,
        layer_row("input_layernorm", "input_norm"),
        layer_row("pre_ff_layernorm", "mlp_norm"),
        layer_row("feed_forward.gate_proj", "mlp.gate_up", "gate"),
        layer_row("feed_forward.up_proj", "mlp.gate_up", "up"),
        layer_row("feed_forward.down_proj", "mlp.down"),
    )

    @staticmethod
    def read_shape(config: Mapping[str, Any]) -> ModelShape:
        """See CausalLM."""
        attended = set(config["attn_layer_indices"] or ())
        bias = bool(config["attention_bias"])
        attention = read_attention(config, window=0, qkv_bias=bias, out_bias=bias)
        mamba, mlp = read_mamba2(config), read_mlp(config)
        return ModelShape(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            max_positions=config["max_position_embeddings"],
            layers=tuple(
                LayerShape(attention=attention if layer in attended else mamba, mlp=mlp)
                for layer in range(config["num_hidden_layers"])
            ),
            norm_epsilon=config["rms_norm_eps"],
            is_tied=bool(config["tie_word_embeddings"]),
        )
