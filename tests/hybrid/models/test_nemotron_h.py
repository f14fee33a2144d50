"""Nemotron-H against transformers, over states in a paged cache."""

from __future__ import annotations

import pytest

from tests.hybrid.models.state_checks import CheckpointSet, check_state_family
from tests.hybrid.models.tiny import BASE, TinyRow

_NEMOTRON = {
    **{key: value for key, value in BASE.items() if key != "num_hidden_layers"},
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
}

ROWS = {
    "dense": TinyRow(
        model_type="nemotron_h",
        config={**_NEMOTRON, "hybrid_override_pattern": "M*-M-", "mlp_bias": True},
    ),
    "wide": TinyRow(  # heads and states that Hopper's kernel takes
        model_type="nemotron_h",
        config={
            **_NEMOTRON,
            "mamba_num_heads": 16,  # too few for one prompt
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "hybrid_override_pattern": "M*-M",
        },
        prompt_lens=(5, 200),
    ),
    "experts": TinyRow(
        model_type="nemotron_h",
        config={
            **_NEMOTRON,
            "hybrid_override_pattern": "MEM*EM",
            "time_step_min": 0.3,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 56,
            "routed_scaling_factor": 2.5,
        },
        prompt_lens=(3, 70),
    ),
    "latent_groups": TinyRow(
        model_type="nemotron_h",
        config={
            **_NEMOTRON,
            "hybrid_override_pattern": "ME*",
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 56,
            "moe_latent_size": 32,
        },
        prompt_lens=(9, 40),
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> CheckpointSet:
    """The tiny checkpoints of this family."""
    return CheckpointSet(ROWS, tmp_path_factory.mktemp("nemotron_h"))


@pytest.mark.parametrize("name", ROWS)
def test_equals_transformers(name: str, checkpoints: CheckpointSet) -> None:
    check_state_family(checkpoints.get(name), ROWS[name].prompt_lens)
