"""LFM2 against transformers, over states in a paged cache."""

from __future__ import annotations

import pytest

from tests.hybrid.models.state_checks import CheckpointSet, check_state_family
from tests.hybrid.models.tiny import BASE, TinyRow

_LFM2 = {key: value for key, value in BASE.items() if key != "head_dim"}

ROWS = {
    "dense": TinyRow(model_type="lfm2", config={**_LFM2, "full_attn_idxs": [1, 3]}),
    "long_filter": TinyRow(
        model_type="lfm2",
        config={
            **_LFM2,
            "full_attn_idxs": [2],
            "conv_L_cache": 5,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
        prompt_lens=(4, 60),
    ),
    "experts": TinyRow(
        model_type="lfm2_moe",
        config={
            **_LFM2,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        prompt_lens=(2, 50),
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> CheckpointSet:
    """The tiny checkpoints of this family."""
    return CheckpointSet(ROWS, tmp_path_factory.mktemp("lfm2"))


@pytest.mark.parametrize("name", ROWS)
def test_equals_transformers(name: str, checkpoints: CheckpointSet) -> None:
    check_state_family(checkpoints.get(name), ROWS[name].prompt_lens)
