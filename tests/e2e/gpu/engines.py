"""Engines of tiny checkpoints on the GPU and on the CPU, driven without text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from vllm import EngineArgs
from vllm.engine.core import EngineCore
from vllm.executor import make_executor
from vllm.sequence import SequenceRequest
from vllm.step import RowSampling

GREEDY = RowSampling(temperature=0.0, num_logprobs=4)


@dataclass(slots=True)
class Answer:
    """One answer.

    Attributes:
        token_ids: what was generated.
        logprobs: for each token, id -> logprob of the chosen and the most likely ones.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)


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


def generate(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    num_tokens: int = 16,
    sampling: RowSampling = GREEDY,
) -> list[Answer]:
    """Answer prompts, all at once."""
    for i, prompt in enumerate(prompts):
        request = SequenceRequest(
            request_id=str(i),
            prompt_token_ids=list(prompt),
            sampling=sampling,
            n=1,
            max_tokens=num_tokens,
        )
        engine.scheduler.add(request)
    found: dict[int, Answer] = defaultdict(Answer)
    while engine.has_work:
        for result in engine.step():
            assert result.error is None
            answer = found[int(result.request_id)]
            answer.token_ids += result.token_ids
            for entry in result.logprobs or ():
                answer.logprobs.append(dict(zip(entry.token_ids, entry.logprobs, strict=True)))
    return [found[i] for i in range(len(prompts))]


def compare(ours: Answer, reference: Answer, tolerance: float) -> int:
    """Check one answer against another, up to where a near tie parts them.

    Returns: how many tokens agree.
    """
    for i, (a, b) in enumerate(zip(ours.token_ids, reference.token_ids, strict=True)):
        if reference.logprobs:
            shared = ours.logprobs[i].keys() & reference.logprobs[i].keys()
            assert shared, "the most likely tokens have nothing in common"
            gap = max(abs(ours.logprobs[i][t] - reference.logprobs[i][t]) for t in shared)
            assert gap <= tolerance, f"token {i}: logprobs differ by {gap:.4f}"
        if a != b:
            best = sorted(reference.logprobs[i].values(), reverse=True)
            assert best[0] - best[1] <= 2 * tolerance, f"token {i}: {a}, expected {b}"
            return i
    return len(ours.token_ids)
