"""Granite 4 hybrid against transformers, over states in a paged cache."""

from __future__ import annotations

import pytest

from tests.hybrid.models.state_checks import CheckpointSet, check_state_family
from tests.hybrid.models.tiny import BASE, TinyRow

_MAMBA = {
    **{key: value for key, value in BASE.items() if key != "head_dim"},
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}

_LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.15,
    "logits_scaling": 1.7,
}

ROWS = {
    "experts": TinyRow(
        model_type="granitemoehybrid",
        config={
            **_MAMBA,
            **_MULTIPLIERS,
            "layer_types": _LAYERS,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
        },
    ),
    "dense": TinyRow(
        model_type="granitemoehybrid",
        config={
            **_MAMBA,
            "layer_types": _LAYERS,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
        },
        prompt_lens=(3, 80),
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> CheckpointSet:
    """The tiny checkpoints of this family."""
    return CheckpointSet(ROWS, tmp_path_factory.mktemp("granite_hybrid"))


@pytest.mark.parametrize("name", ROWS)
def test_equals_transformers(name: str, checkpoints: CheckpointSet) -> None:
    check_state_family(checkpoints.get(name), ROWS[name].prompt_lens)
