"""Prompt logprobs are queued with their step and read when it is waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm.step import PlanRow, RowSampling
from vllm.worker import prompt_logprobs
from vllm.worker.input_batch import BatchRow, StepInput
from vllm.worker.prompt_logprobs import launch_prompt_logprobs

VOCAB, HIDDEN = 37, 8
PROMPT = [(7 * i) % VOCAB for i in range(300)]


class HostOnly:
    """A batch that is on a device: to read its tensors would wait for it."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")


class Tokens:
    """What is asked of an input batch."""

    def get_tokens(self, row: BatchRow, start: int, stop: int) -> np.ndarray:
        return np.array(PROMPT[start:stop], dtype=np.int64)


def make_row(num_logprobs: int | None, num_computed: int, num_new: int) -> tuple[PlanRow, BatchRow]:
    state = SimpleNamespace(params=RowSampling(num_prompt_logprobs=num_logprobs))
    row: Any = SimpleNamespace(num_prompt_tokens=len(PROMPT), state=state)
    planned = PlanRow(
        seq_id=0, num_computed_tokens=num_computed, num_new_tokens=num_new, new_block_ids=()
    )
    return planned, row


def make_step(*rows: tuple[PlanRow, BatchRow]) -> StepInput:
    return StepInput(
        batch=HostOnly(),  # type: ignore[arg-type]
        plan_rows=[planned for planned, _ in rows],
        rows=[row for _, row in rows],
        sampled=[],
        order=None,
        is_decode=False,
    )


STEP = make_step(make_row(2, 5, 1), make_row(None, 0, 9), make_row(0, 0, 200), make_row(1, 290, 10))


def check_entries(found: dict[int, Any], logits: Tensor) -> None:
    """Check each row against the log-softmax of the tokens that predict it."""
    assert {index: (row.start, len(row.entries)) for index, row in found.items()} == {
        0: (6, 1),
        2: (1, 200),
        3: (291, 9),
    }, "what the last prompt token predicts is no longer prompt"
    for index, first, num_logprobs in ((0, 0, 2), (2, 10, 0), (3, 210, 1)):
        for i, entry in enumerate(found[index].entries):
            values = logits[first + i].log_softmax(-1)
            target = PROMPT[found[index].start + i]
            ids = [target, *values.topk(num_logprobs).indices.tolist()]
            assert entry.token_ids == ids
            assert entry.logprobs == pytest.approx(values[ids].tolist(), abs=1e-4)


def test_nothing_is_read_before_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, matrix = torch.randn(220, HIDDEN), torch.randn(HIDDEN, VOCAB)
    events: list[str] = []

    class Download(prompt_logprobs.Download):
        def wait(self) -> list[Tensor]:
            events.append("wait")
            return super().wait()

    monkeypatch.setattr(prompt_logprobs, "Download", Download)

    def compute_logits(x: Tensor) -> Tensor:
        assert len(x) <= 64, "so many logits exist at a time"
        events.append("logits")
        return x @ matrix

    pending = launch_prompt_logprobs(STEP, hidden, compute_logits, Tokens())  # type: ignore[arg-type]
    assert set(events) == {"logits"}
    check_entries(pending.wait(), hidden @ matrix)
    assert events.count("wait") == 1


def test_a_step_that_scores_nothing() -> None:
    step = make_step(make_row(None, 0, 9), make_row(3, 299, 1))
    pending = launch_prompt_logprobs(step, torch.zeros(10, HIDDEN), None, Tokens())  # type: ignore[arg-type]
    assert pending.wait() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_not_waited_for() -> None:
    from vllm._custom_ops.library import load_extension
    from vllm._custom_ops.triton.table import register_triton_ops

    load_extension()
    register_triton_ops()
    hidden = torch.randn(220, HIDDEN, device="cuda")
    matrix = torch.randn(HIDDEN, VOCAB, device="cuda")
    arguments = (STEP, hidden, lambda x: x @ matrix, Tokens())
    launch_prompt_logprobs(*arguments).wait()  # type: ignore[arg-type]  # libraries are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = launch_prompt_logprobs(*arguments)  # type: ignore[arg-type]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check_entries(pending.wait(), (hidden @ matrix).cpu())
