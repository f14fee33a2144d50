"""Two gloo ranks give what transformers gives; what each rank keeps of a token."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.hybrid.models import test_deepseek_v2, test_gemma3n, test_gpt_oss, test_llama4
from tests.hybrid.models.tiny import TinyCheckpoint, make_checkpoint
from tests.hybrid.models.tp_rank import PROMPT_LENGTHS
from tests.model_executor.layers.test_linear import make_rank
from tests.models.compare import assert_follows, make_prompts
from tests.models.families import load_ours
from tests.utils.paged_driver import Generated
from vllm.errors import ConfigError

SIZE = 2
ROWS = {
    "deepseek_v2": test_deepseek_v2.ROW,
    "gemma3n": test_gemma3n.ROW,
    "gpt_oss": test_gpt_oss.ROW,
    "llama4": test_llama4.ROW,
}
SPLIT = {"deepseek_v2": 1, "gemma3n": 2, "gpt_oss": 2, "llama4": 2}
"""By how much a rank's part of a token's row is smaller; a compressed row is whole everywhere."""

RankResult = dict[tuple[str, torch.dtype], tuple[list[tuple[list[int], Tensor]], list[int]]]


@dataclass(frozen=True)
class Run:
    """The checkpoints, and what each rank made of them."""

    checkpoints: dict[str, TinyCheckpoint]
    ranks: list[RankResult]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks over all families."""
    root = tmp_path_factory.mktemp("ranks")
    checkpoints = {name: make_checkpoint(row, root / name) for name, row in ROWS.items()}
    command = [sys.executable, "-m", "tests.hybrid.models.tp_rank", str(root)]
    here = Path(__file__).parents[3]
    ranks = [subprocess.Popen([*command, str(rank), str(SIZE)], cwd=here) for rank in range(SIZE)]
    try:
        codes = [process.wait(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0] * SIZE
    return Run(checkpoints, [torch.load(root / f"rank{rank}.pt") for rank in range(SIZE)])


@pytest.mark.parametrize("name", ROWS)
def test_two_ranks_equal_transformers(name: str, run: Run) -> None:
    outputs, _ = run.ranks[0][name, torch.float32]
    made = [Generated(token_ids=tokens, logits=list(logits)) for tokens, logits in outputs]
    assert_follows(run.checkpoints[name].reference, make_prompts(PROMPT_LENGTHS), made)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_both_ranks_have_the_same_bits(name: str, dtype: torch.dtype, run: Run) -> None:
    (outputs, _), (others, _) = (rank[name, dtype] for rank in run.ranks)
    for (tokens, logits), (other_tokens, other_logits) in zip(outputs, others, strict=True):
        assert tokens == other_tokens
        assert torch.equal(logits, other_logits)
        assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", ROWS)
def test_what_a_rank_keeps_of_a_token(name: str, run: Run) -> None:
    checkpoint = run.checkpoints[name]
    whole = load_ours(checkpoint.config, checkpoint.weights).cache_specs()
    for rank in run.ranks:
        _, token_bytes = rank[name, torch.float32]
        assert [kept * SPLIT[name] for kept in token_bytes] == [s.token_bytes for s in whole]


@pytest.mark.parametrize("name", ROWS)
def test_heads_that_cannot_be_split_are_refused(name: str, run: Run) -> None:
    checkpoint = run.checkpoints[name]
    with pytest.raises(ConfigError, match="num_attention_heads"):
        load_ours(checkpoint.config, checkpoint.weights, tp=make_rank(0, 3))
