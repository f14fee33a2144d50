"""Qwen3-Next against transformers, over states in a paged cache."""

from __future__ import annotations

import pytest

from tests.hybrid.models.state_checks import CheckpointSet, check_state_family
from tests.hybrid.models.tiny import BASE, TinyRow

_DELTA_NET = {
    **BASE,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}

ROWS = {
    "experts": TinyRow(
        model_type="qwen3_next",
        config={**_DELTA_NET, **_EXPERTS, "mlp_only_layers": [1], "attention_bias": True},
    ),
    "dense": TinyRow(
        model_type="qwen3_next",
        config={**_DELTA_NET, "num_experts": 0, "full_attention_interval": 2},
        prompt_lens=(2, 130),
    ),
    "wide": TinyRow(  # keys and values that Hopper's kernel takes
        model_type="qwen3_next",
        config={
            **_DELTA_NET,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 0,
            "full_attention_interval": 2,
        },
        prompt_lens=(5, 200),
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> CheckpointSet:
    """The tiny checkpoints of this family."""
    return CheckpointSet(ROWS, tmp_path_factory.mktemp("qwen3_next"))


@pytest.mark.parametrize("name", ROWS)
def test_equals_transformers(name: str, checkpoints: CheckpointSet) -> None:
    check_state_family(checkpoints.get(name), ROWS[name].prompt_lens)
