"""Two gloo ranks give what one gives, for every family; what cannot be split is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.model_executor.layers.test_linear import make_rank
from tests.models.compare import assert_follows, make_prompts
from tests.models.conftest import CheckpointSet
from tests.models.families import FAMILIES, load_ours
from tests.models.tp_rank import NUM_TOKENS, PROMPT_LENGTHS
from tests.utils.paged_driver import Generated, PagedDriver
from vllm.errors import ConfigError

KERNEL = "cpu"
SIZE = 2

RankResult = dict[tuple[str, torch.dtype], list[tuple[list[int], Tensor]]]


@pytest.fixture(scope="module")
def rank_results(checkpoints: CheckpointSet) -> list[RankResult]:
    """What each of two ranks made of every family."""
    for name in FAMILIES:
        config = json.dumps(checkpoints.get(name).config)
        (checkpoints.directory / name / "engine_config.json").write_text(config)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.models.tp_rank", str(checkpoints.directory)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(SIZE), KERNEL], cwd=root) for rank in range(SIZE)
    ]
    try:
        codes = [process.wait(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0] * SIZE
    return [torch.load(checkpoints.directory / f"rank{rank}.pt") for rank in range(SIZE)]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_equal_transformers(
    name: str, checkpoints: CheckpointSet, rank_results: list[RankResult]
) -> None:
    made = [
        Generated(token_ids=tokens, logits=list(logits))
        for tokens, logits in rank_results[0][name, torch.float32]
    ]
    assert_follows(checkpoints.get(name).reference, make_prompts(PROMPT_LENGTHS), made)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_give_the_tokens_of_one(
    name: str, checkpoints: CheckpointSet, rank_results: list[RankResult]
) -> None:
    checkpoint = checkpoints.get(name)
    one = PagedDriver(load_ours(checkpoint.config, checkpoint.weights), kernel=KERNEL)
    expected = one.generate(make_prompts(PROMPT_LENGTHS), NUM_TOKENS)
    for output, (tokens, _) in zip(expected, rank_results[0][name, torch.float32], strict=True):
        assert tokens == output.token_ids


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_both_ranks_have_the_same_bits(
    name: str, dtype: torch.dtype, rank_results: list[RankResult]
) -> None:
    for (tokens, logits), (other_tokens, other_logits) in zip(
        rank_results[0][name, dtype], rank_results[1][name, dtype], strict=True
    ):
        assert tokens == other_tokens
        assert torch.equal(logits, other_logits)
        assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    ("name", "size", "text"),
    [
        ("llama", 3, r"num_attention_heads \(4\) cannot be split over tensor_parallel_size=3"),
        ("llama", 8, r"num_attention_heads \(4\) cannot be split over tensor_parallel_size=8"),
        ("mixtral", 8, r"num_attention_heads"),
        ("gemma3", 5, r"num_attention_heads"),
    ],
)
def test_what_cannot_be_split_is_refused(
    name: str, size: int, text: str, checkpoints: CheckpointSet
) -> None:
    checkpoint = checkpoints.get(name)
    with pytest.raises(ConfigError, match=text):
        load_ours(checkpoint.config, checkpoint.weights, tp=make_rank(0, size))


def test_experts_that_cannot_be_split_are_refused(checkpoints: CheckpointSet) -> None:
    checkpoint = checkpoints.get("mixtral")
    config = {**checkpoint.config, "intermediate_size": 30}
    with pytest.raises(ConfigError, match=r"experts \(30\) cannot be split over"):
        load_ours(config, checkpoint.weights, tp=make_rank(0, 4))
