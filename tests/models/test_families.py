"""Every family against transformers: logits, greedy tokens, chunks, batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.compare import assert_follows, make_prompts
from tests.models.conftest import CheckpointSet
from tests.models.families import FAMILIES, load_ours
from tests.utils.paged_driver import PagedDriver
from vllm.distributed.parallel_state import TensorParallel
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.table import ARCHITECTURES

KERNEL = "cpu"
NUM_TOKENS = 64


def test_the_table_covers_every_class() -> None:
    """A family has a row here, or a file of its own that is called after its module."""
    tested = {row.model_type.removesuffix("_text") for row in FAMILIES.values()}
    tests = Path(__file__).parents[1].rglob("models/test_*.py")
    tested |= {path.stem.removeprefix("test_") for path in tests}
    built_in = {place.rsplit(":")[0].rsplit(".")[-1] for place in ARCHITECTURES.values()}
    assert built_in <= tested


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_and_logits_equal_transformers(name: str, checkpoints: CheckpointSet) -> None:
    made = checkpoints.get(name)
    prompts = make_prompts()
    driver = PagedDriver(load_ours(made.config, made.weights), kernel=KERNEL)
    assert_follows(made.reference, prompts, driver.generate(prompts, NUM_TOKENS))


@pytest.mark.parametrize("name", FAMILIES)
def test_bits_do_not_depend_on_chunks_or_batch(name: str, checkpoints: CheckpointSet) -> None:
    made = checkpoints.get(name)
    prompts = make_prompts((5, 33, 90))
    driver = PagedDriver(load_ours(made.config, made.weights), kernel=KERNEL)
    whole = driver.generate(prompts, 8)
    for chunk_tokens in (7, 16, 61):
        for one, other in zip(
            whole, driver.generate(prompts, 8, chunk_tokens=chunk_tokens), strict=True
        ):
            assert one.token_ids == other.token_ids
            assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
    kept = driver.step({10 + i: prompt for i, prompt in enumerate(prompts)}, keeps_rows=True)
    assert all(torch.equal(one, other.logits[0]) for one, other in zip(kept, whole, strict=True))
    for index, prompt in enumerate(prompts):
        (alone,) = driver.generate([prompt], 8)
        assert alone.token_ids == whole[index].token_ids
        assert torch.equal(torch.stack(alone.logits), torch.stack(whole[index].logits))


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_runs_and_stays_near(name: str, checkpoints: CheckpointSet) -> None:
    """bfloat16 keeps 8 bits: logits stay within a few steps of float32, the same in any chunks."""
    made = checkpoints.get(name)
    prompts = make_prompts((9, 40))
    precise = PagedDriver(load_ours(made.config, made.weights), kernel=KERNEL)
    rough = PagedDriver(load_ours(made.config, made.weights, dtype=torch.bfloat16), kernel=KERNEL)
    expected = precise.step(dict(enumerate(prompts)))
    actual = rough.step(dict(enumerate(prompts)))
    for one, other in zip(expected, actual, strict=True):
        assert (one - other).abs().max() < 0.12 * one.abs().max()
    for index, prompt in enumerate(prompts):
        pieces = [prompt[i : i + 5] for i in range(0, len(prompt), 5)]
        for piece in pieces:
            (chunked,) = rough.step({10 + index: piece})
        assert torch.equal(chunked, actual[index])


def test_blocks_of_other_sizes(checkpoints: CheckpointSet) -> None:
    made = checkpoints.get("gemma3")
    prompts = make_prompts((3, 50))
    for block_tokens in (8, 32):
        model = load_ours(made.config, made.weights)
        driver = PagedDriver(model, kernel=KERNEL, block_tokens=block_tokens)
        assert_follows(made.reference, prompts, driver.generate(prompts, 24))


def test_gemma_rounds_its_embedding_scale_to_the_dtype(checkpoints: CheckpointSet) -> None:
    """sqrt(96) is 9.798; transformers multiplies bfloat16 embeddings by 9.8125."""
    config = {**checkpoints.get("gemma2").config, "hidden_size": 96, "num_hidden_layers": 0}
    cls, _ = ModelRegistry.resolve_model_cls("Gemma2ForCausalLM")
    model = cls({**config, "layer_types": []}, dtype=torch.bfloat16, tp=TensorParallel.single())
    model.embed.parameter("weight").fill_(1.0)
    scaled = model.embed_tokens(torch.tensor([3, 4]))
    assert torch.equal(scaled, torch.full((2, 96), 9.8125, dtype=torch.bfloat16))
