"""What every hybrid family must pass: H1 against transformers, over the paged cache.

Called by the families' tests. Greedy tokens and logits equal the dense reference; chunks, batches
and decode steps give the same bits as one prefill.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.hybrid.models.tiny import TinyCheckpoint
from tests.models.compare import assert_follows, make_prompts
from tests.models.families import load_ours
from tests.utils.paged_driver import PagedDriver
from vllm.distributed.parallel_state import TensorParallel


def make_driver(
    checkpoint: TinyCheckpoint,
    *,
    kernel: str = "cpu",
    dtype: torch.dtype = torch.float32,
    tp: TensorParallel | None = None,
) -> PagedDriver:
    """Load our model of a checkpoint and give it a cache."""
    return PagedDriver(
        load_ours(checkpoint.config, checkpoint.weights, dtype=dtype, tp=tp), kernel=kernel
    )


def check_against_transformers(
    checkpoint: TinyCheckpoint, prompt_lens: Sequence[int], *, num_tokens: int = 64
) -> None:
    """Greedy tokens of a batch of prompts, in chunks of odd length, and their logits."""
    prompts = make_prompts(prompt_lens)
    made = make_driver(checkpoint).generate(prompts, num_tokens, chunk_tokens=23)
    assert_follows(checkpoint.reference, prompts, made)


def check_ways_of_computing(
    checkpoint: TinyCheckpoint, length: int, *, dtype: torch.dtype = torch.float32
) -> None:
    """One prefill, odd chunks, token by token and beside other rows: the same bits."""
    (prompt, other) = make_prompts((length, 29))
    driver = make_driver(checkpoint, dtype=dtype)
    (whole,) = driver.step({0: prompt}, all_logits=True)
    assert torch.isfinite(whole).all()
    assert torch.equal(_run_in_chunks(driver, 1, prompt, 7), whole)
    assert torch.equal(_run_in_chunks(driver, 2, prompt, 1), whole)
    last, _ = driver.step({6: prompt, 7: other}, keeps_rows=True)
    assert torch.equal(last, whole[-1])
    driver.step({3: other[:13]})
    together = driver.step({3: other[13:], 4: prompt, 5: other}, all_logits=True)
    assert torch.equal(together[1], whole)
    assert torch.equal(together[0], together[2][13:])


def _run_in_chunks(
    driver: PagedDriver, number: int, prompt: Sequence[int], chunk_tokens: int
) -> Tensor:
    pieces = [
        driver.step({number: prompt[i : i + chunk_tokens]}, all_logits=True)[0]
        for i in range(0, len(prompt), chunk_tokens)
    ]
    return torch.cat(pieces)
