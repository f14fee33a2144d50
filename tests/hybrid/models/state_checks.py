"""What families whose layers keep a state must pass beside `checks.py`: reused and short states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tests.hybrid.models.checks import check_against_transformers, check_ways_of_computing
from tests.hybrid.models.thread_ranks import run_ranks
from tests.hybrid.models.tiny import TinyCheckpoint, TinyRow, make_checkpoint
from tests.models.compare import make_prompts, reference_logits
from tests.models.families import load_ours
from tests.utils.paged_driver import PagedDriver
from vllm.distributed.parallel_state import TensorParallel
from vllm.hybrid.layer_kinds import read_layer_kinds


class CheckpointSet:
    """Checkpoints of some rows, made on first use."""

    def __init__(self, rows: Mapping[str, TinyRow], directory: Path) -> None:
        self._rows = rows
        self._directory = directory
        self._made: dict[str, TinyCheckpoint] = {}

    def get(self, name: str) -> TinyCheckpoint:
        """Return the checkpoint of a row."""
        if name not in self._made:
            self._made[name] = make_checkpoint(self._rows[name], self._directory / name)
        return self._made[name]


def check_state_family(made: TinyCheckpoint, prompt_lens: tuple[int, ...]) -> None:
    """All checks of one checkpoint."""
    check_against_transformers(made, prompt_lens)
    for dtype in (torch.float32, torch.bfloat16):
        check_ways_of_computing(made, 70, dtype=dtype)
    check_short_prompts(made)
    check_interleaved_sequences(made)
    check_two_ranks(made)
    check_kinds(made)


def check_short_prompts(made: TinyCheckpoint) -> None:
    """Prompts shorter than a filter, in every cut, over blocks that the last one left as NaN."""
    model = load_ours(made.config, made.weights)
    driver = PagedDriver(model, num_blocks=1, kernel="cpu", poison_freed=True)
    for length in range(1, 7):
        (prompt,) = make_prompts((length,))
        expected = reference_logits(made.reference, prompt)
        for cut in range(length):
            parts = [part for part in (prompt[:cut], prompt[cut:]) if part]
            logits = torch.cat([driver.step({0: part}, all_logits=True)[0] for part in parts])
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
            driver.free(0)


def check_interleaved_sequences(made: TinyCheckpoint) -> None:
    """Sequences that come, pause and go over few blocks, new ones in blocks of ended ones."""
    driver = PagedDriver(
        load_ours(made.config, made.weights), num_blocks=9, kernel="cpu", poison_freed=True
    )
    first, second, third = make_prompts((40, 23, 31))
    wanted = [reference_logits(made.reference, prompt) for prompt in (first, second, third)]
    (a,) = driver.step({0: first[:17]}, all_logits=True)
    b, c = driver.step({1: second[:2], 0: first[17:18]}, all_logits=True)
    (d,) = driver.step({1: second[2:]}, all_logits=True)
    driver.free(1)
    e, f = driver.step({2: third[:30], 0: first[18:]}, all_logits=True)
    (g,) = driver.step({2: third[30:]}, all_logits=True)
    for parts, expected in zip(((a, c, f), (b, d), (e, g)), wanted, strict=True):
        torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-4)


def check_two_ranks(made: TinyCheckpoint) -> None:
    """Two ranks, each with its heads and its share of every state, compute what one computes."""
    (prompt,) = make_prompts((21,))
    parts = (prompt[:18], prompt[18:])

    def run(tp: TensorParallel) -> tuple[Tensor, int]:
        model = load_ours(made.config, made.weights, tp=tp)
        driver = PagedDriver(model, kernel="cpu")
        logits = torch.cat([driver.step({0: part}, all_logits=True)[0] for part in parts])
        return logits, sum(spec.sequence_bytes for spec in model.cache_specs())

    one, one_bytes = run(TensorParallel.single())
    for logits, num_bytes in run_ranks(2, run):
        torch.testing.assert_close(logits, one, rtol=0, atol=1e-4)
        assert num_bytes < one_bytes


def check_kinds(made: TinyCheckpoint) -> None:
    """What the config says of its layers is what the model's layers keep."""
    specs = load_ours(made.config, made.weights).cache_specs()
    kinds = read_layer_kinds(made.config)
    assert [kind.lifetime for kind in kinds] == [spec.lifetime for spec in specs]
    assert [kind.layer for kind in kinds] == [spec.layer for spec in specs]
