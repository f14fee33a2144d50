"""Bamba against transformers, over states in a paged cache."""

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

ROWS = {
    "bamba": TinyRow(model_type="bamba", config={**_MAMBA, "attn_layer_indices": [2]}),
    "biased": TinyRow(
        model_type="bamba",
        config={
            **_MAMBA,
            "attn_layer_indices": [0],
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mlp_bias": True,
            "attention_bias": True,
            "time_step_limit": [0.2, 0.9],
            "tie_word_embeddings": True,
        },
        prompt_lens=(5, 100),
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> CheckpointSet:
    """The tiny checkpoints of this family."""
    return CheckpointSet(ROWS, tmp_path_factory.mktemp("bamba"))


@pytest.mark.parametrize("name", ROWS)
def test_equals_transformers(name: str, checkpoints: CheckpointSet) -> None:
    check_state_family(checkpoints.get(name), ROWS[name].prompt_lens)
