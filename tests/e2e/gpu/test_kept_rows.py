"""Steps that keep only the sampled tokens after the last mixer answer as those that keep all.

A step keeps all where prompt logprobs are asked for. float32: logprobs within 2e-3 and the same
tokens but for near ties. The prompts of a step are more than small steps hold, see `PromptSize`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.gpu.engines import GREEDY, WITH_PROMPTS, compare, generate, make_prompts, run_engine
from tests.e2e.gpu.families import NAMES, write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
NUM_TOKENS = 6
PROMPT_LENS = (200,) * 8 + (31, 77)


@pytest.mark.parametrize("name", NAMES)
def test_same_answers_with_prompt_logprobs_and_without(name: str, tmp_path: Path) -> None:
    folder = Path(write_checkpoint(name, tmp_path))
    prompts = make_prompts(PROMPT_LENS)
    flags = {"max_num_batched_tokens": 2048, "max_num_seqs": 16}
    with run_engine(folder, "cuda", dtype="float32", **flags) as engine:
        kept = generate(engine, prompts, NUM_TOKENS, sampling=GREEDY)
        whole = generate(engine, prompts, NUM_TOKENS, sampling=WITH_PROMPTS)
    for answer in whole:
        assert answer.prompt_logprobs
        answer.prompt_logprobs = []
    agreed = sum(compare(a, b, 2e-3) for a, b in zip(kept, whole, strict=True))
    assert agreed >= 0.9 * NUM_TOKENS * len(prompts)
