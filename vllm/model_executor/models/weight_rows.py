"""Names of checkpoints as tables, shared by the families that use them.

A family adds the groups that it needs; rows whose module a model does not have give nothing. Read
by `weight_map.py` only.
"""

from __future__ import annotations

from vllm.model_executor.models.weight_map import WeightRow


def layer_row(source: str, target: str, shard: str | None = None) -> WeightRow:
    """Return the row of a tensor inside a decoder layer, names relative to the layer."""
    return WeightRow(
        source=f"model.layers.{{i}}.{source}", target=f"layers.{{i}}.{target}", shard=shard
    )


OUTER_ROWS = (
    WeightRow(source="model.embed_tokens", target="embed"),
    WeightRow(source="model.norm", target="norm"),
    WeightRow(source="lm_head", target="lm_head"),
)

ATTENTION_ROWS = (
    layer_row("self_attn.q_proj", "attention.qkv", "q"),
    layer_row("self_attn.k_proj", "attention.qkv", "k"),
    layer_row("self_attn.v_proj", "attention.qkv", "v"),
    layer_row("self_attn.q_norm", "attention.q_norm"),
    layer_row("self_attn.k_norm", "attention.k_norm"),
    layer_row("self_attn.o_proj", "attention.out"),
)

PRE_NORM_ROWS = (
    layer_row("input_layernorm", "input_norm"),
    layer_row("post_attention_layernorm", "mlp_norm"),
)

SANDWICH_NORM_ROWS = (
    layer_row("input_layernorm", "input_norm"),
    layer_row("post_attention_layernorm", "post_attention_norm"),
    layer_row("pre_feedforward_layernorm", "mlp_norm"),
    layer_row("post_feedforward_layernorm", "post_mlp_norm"),
)
"""Gemma 2 and 3: a norm before and after attention and MLP."""

MLP_ROWS = (
    layer_row("mlp.gate_proj", "mlp.gate_up", "gate"),
    layer_row("mlp.up_proj", "mlp.gate_up", "up"),
    layer_row("mlp.down_proj", "mlp.down"),
)

EXPERT_ROWS = (
    layer_row("mlp.gate", "mlp.router"),
    layer_row("mlp.experts.{e}.gate_proj", "mlp.experts", "gate"),
    layer_row("mlp.experts.{e}.up_proj", "mlp.experts", "up"),
    layer_row("mlp.experts.{e}.down_proj", "mlp.experts", "down"),
    layer_row("mlp.shared_expert.gate_proj", "mlp.shared.gate_up", "gate"),
    layer_row("mlp.shared_expert.up_proj", "mlp.shared.gate_up", "up"),
    layer_row("mlp.shared_expert.down_proj", "mlp.shared.down"),
    layer_row("mlp.shared_expert_gate", "mlp.shared_gate"),
)

MIXTRAL_EXPERT_ROWS = (
    layer_row("block_sparse_moe.gate", "mlp.router"),
    layer_row("block_sparse_moe.experts.{e}.w1", "mlp.experts", "gate"),
    layer_row("block_sparse_moe.experts.{e}.w3", "mlp.experts", "up"),
    layer_row("block_sparse_moe.experts.{e}.w2", "mlp.experts", "down"),
)

LLAMA_ROWS = OUTER_ROWS + ATTENTION_ROWS + PRE_NORM_ROWS + MLP_ROWS
