"""A model whose layers differ in heads, head size and MLP size (`per_layer_config`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.models.compare import assert_follows, make_prompts
from tests.models.families import load_ours, make_reference, randomize, read_config
from tests.utils.paged_driver import PagedDriver

OVERRIDES: dict[str, dict[str, Any]] = {
    "1": {"num_key_value_heads": 4, "head_dim": 40},
    "2": {"num_key_value_heads": 1, "intermediate_size": 64},
}


def make_uneven_reference() -> nn.Module:
    """Build transformers' Llama and replace layers by ones of another config."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    class UnevenLayer(LlamaDecoderLayer):
        def __init__(self, config: LlamaConfig, index: int) -> None:
            super().__init__(config, index)
            self.own_rope = LlamaRotaryEmbedding(config)

        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            kwargs["position_embeddings"] = self.own_rope(hidden_states, kwargs["position_ids"])
            return super().forward(hidden_states, **kwargs)

    model = make_reference("llama")
    base = model.config.to_dict()
    for index, own in OVERRIDES.items():
        config = LlamaConfig(**{**base, **own})
        config._attn_implementation = "eager"
        model.model.layers[int(index)] = UnevenLayer(config, int(index)).eval()
    return randomize(model)


def test_layers_of_different_sizes_follow_the_reference() -> None:
    reference = make_uneven_reference()
    config = {**read_config(reference), "per_layer_config": OVERRIDES}
    model = load_ours(config, reference.state_dict())
    assert [spec.token_bytes for spec in model.cache_specs()] == [
        2 * 2 * 32 * 4,
        2 * 4 * 40 * 4,
        2 * 1 * 32 * 4,
    ]
    prompts = make_prompts((5, 50))
    assert_follows(reference, prompts, PagedDriver(model, kernel="cpu").generate(prompts, 32))
