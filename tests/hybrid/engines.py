"""Engines of tiny checkpoints in hybrid mode: made from flags, driven without text.

The cache is filled with NaN whenever a block is handed out, so that a row that was never written,
or given up too early, shows in the answer.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm import EngineArgs
from vllm.engine.core import EngineCore
from vllm.executor import make_executor
from vllm.sequence import SequenceRequest
from vllm.step import RowSampling

GREEDY = RowSampling(temperature=0.0)


def write_json(path: Path, content: Any) -> str:
    """Write a hybrid config and return its path."""
    path.write_text(json.dumps(content))
    return str(path)


def name_layers(directory: Path, layers: dict[str, list[int]]) -> None:
    """Put `hybrid_attention_layers` into a checkpoint's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hybrid_attention_layers": layers}))


@contextmanager
def run_engine(model: Path | str, **flags: Any) -> Iterator[EngineCore]:
    """Start an engine in this process with a poisoned cache; it ends with the block."""
    options = {"dtype": "float32", "max_model_len": 400, "max_num_seqs": 16, **flags}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_POISON_CACHE", "1")
        config = EngineArgs(
            model=str(model), skip_tokenizer_init=True, **options
        ).create_engine_config()
        engine = EngineCore(config, make_executor(config))
    try:
        yield engine
    finally:
        engine.shutdown()


def generate(
    engine: EngineCore, prompts: Sequence[Sequence[int]], num_tokens: int = 12
) -> list[list[int]]:
    """Answer prompts greedily, all at once."""
    for i, prompt in enumerate(prompts):
        engine.scheduler.add(
            SequenceRequest(
                request_id=str(i),
                prompt_token_ids=list(prompt),
                sampling=GREEDY,
                n=1,
                max_tokens=num_tokens,
            )
        )
    found: dict[int, list[int]] = defaultdict(list)
    while engine.has_work:
        for result in engine.step():
            assert result.error is None
            found[int(result.request_id)] += result.token_ids
    return [found[i] for i in range(len(prompts))]


@torch.inference_mode()
def reference(
    model: Any, prompt: Sequence[int], num_tokens: int = 12, *, window: int = 0, sinks: int = 0
) -> list[int]:
    """Continue greedily with transformers, dense and without a cache.

    Args:
        model: of transformers.
        prompt: token ids.
        num_tokens: of the answer.
        window: tokens that stay visible in every layer, on top of what the model masks; 0 is all.
        sinks: first tokens that stay visible beside them.
    """
    ids = torch.tensor([list(prompt)])
    for _ in range(num_tokens):
        mask = None
        if window:
            at = torch.arange(ids.shape[1])
            near = (at[None, :] > at[:, None] - window) | (at[None, :] < sinks)
            seen = near & (at[None, :] <= at[:, None])
            mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        logits = model(ids, attention_mask=mask, use_cache=False).logits[0, -1]
        ids = torch.cat((ids, logits.argmax().view(1, 1)), dim=1)
    return ids[0, len(prompt) :].tolist()
