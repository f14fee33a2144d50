"""Engines of tiny checkpoints on the GPU and on the CPU, driven without text."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm import EngineArgs
from vllm.engine.core import EngineCore
from vllm.executor import make_executor
from vllm.sequence import SequenceRequest
from vllm.step import RowSampling, TokenLogprobs

GREEDY = RowSampling(temperature=0.0, num_logprobs=4)
WITH_PROMPTS = RowSampling(temperature=0.0, num_logprobs=8, num_prompt_logprobs=8)
PROMPT_LENS = (1, 17, 40, 90)


@dataclass(slots=True)
class Answer:
    """One answer.

    Attributes:
        token_ids: what was generated.
        logprobs: for each token, id -> logprob of the chosen and the most likely ones.
        prompt_logprobs: the same for each token of the prompt but the first, where asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)


@contextmanager
def run_engine(model: Path, device: str, *, steps: int = 2, **flags: Any) -> Iterator[EngineCore]:
    """Start an engine in this process with a poisoned cache; it ends with the block.

    Args:
        model: checkpoint directory.
        device: "cpu" or "cuda".
        steps: steps in flight.
        flags: of the engine.
    """
    options = {
        "max_model_len": 250,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 400,
        **flags,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_POISON_CACHE", "1")
        config = EngineArgs(
            model=str(model), device=device, skip_tokenizer_init=True, **options
        ).create_engine_config()
        scheduler = replace(
            config.scheduler_config, max_steps_in_flight=steps if device == "cuda" else 1
        )
        config = replace(config, scheduler_config=scheduler)
        engine = EngineCore(config, make_executor(config))
    try:
        yield engine
    finally:
        engine.shutdown()


def make_prompts(lens: Sequence[int] = PROMPT_LENS) -> list[list[int]]:
    """Return prompts, if not told below, at and above the sizes of blocks, windows and steps."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in lens]


def generate(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    num_tokens: int = 16,
    sampling: RowSampling = GREEDY,
    gap: int = 0,
) -> list[Answer]:
    """Answer prompts, all at once or each so many steps after the one before."""
    waiting = deque(
        SequenceRequest(
            request_id=str(i),
            prompt_token_ids=list(prompt),
            sampling=sampling,
            n=1,
            max_tokens=num_tokens,
        )
        for i, prompt in enumerate(prompts)
    )
    found: dict[int, Answer] = defaultdict(Answer)
    num_steps = 0
    while waiting or engine.has_work:
        num_new = 0 if gap and num_steps % gap else 1 if gap else len(waiting)
        for _ in range(min(num_new, len(waiting))):
            engine.scheduler.add(waiting.popleft())
        num_steps += 1
        for result in engine.step():
            assert result.error is None
            answer = found[int(result.request_id)]
            answer.token_ids += result.token_ids
            answer.logprobs += map(_read, result.logprobs or ())
            answer.prompt_logprobs += map(_read, result.prompt_logprobs or ())
    return [found[i] for i in range(len(prompts))]


def _read(entry: TokenLogprobs) -> dict[int, float]:
    return dict(zip(entry.token_ids, entry.logprobs, strict=True))


def find_gap(ours: Mapping[int, float], reference: Mapping[int, float]) -> float:
    """Return the largest difference of logprobs of the ids that both name."""
    shared = ours.keys() & reference.keys()
    assert shared, "the most likely tokens have nothing in common"
    return max(abs(ours[i] - reference[i]) for i in shared)


def compare(ours: Answer, reference: Answer, tolerance: float) -> int:
    """Check one answer against another, up to where a near tie parts them.

    Returns: how many tokens agree.
    """
    for i, pair in enumerate(zip(ours.prompt_logprobs, reference.prompt_logprobs, strict=True), 1):
        gap = find_gap(*pair)
        assert gap <= tolerance, f"prompt token {i}: logprobs differ by {gap:.4f}"
    for i, (a, b) in enumerate(zip(ours.token_ids, reference.token_ids, strict=True)):
        if reference.logprobs:
            gap = find_gap(ours.logprobs[i], reference.logprobs[i])
            assert gap <= tolerance, f"token {i}: logprobs differ by {gap:.4f}"
        if a != b:
            best = sorted(reference.logprobs[i].values(), reverse=True)
            assert best[0] - best[1] <= 2 * tolerance, f"token {i}: {a}, expected {b}"
            return i
    return len(ours.token_ids)
