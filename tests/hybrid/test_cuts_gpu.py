"""Upper layers leave out on a GPU too what no answer can see.

float32 on a cache of NaN: the same tokens but for near ties, logprobs within 2e-3. Prompts ask for
their own logprobs where nothing is to be left out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.gpu.engines import GREEDY, WITH_PROMPTS, compare, generate, make_prompts, run_engine
from tests.hybrid.models.tiny import TinyRow, make_checkpoint
from tests.hybrid.test_cuts import READERS
from tests.utils.fixtures_models import build_reach, save_checkpoint
from vllm.worker.block_table import Int64Array
from vllm.worker.cut_batch import CutRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_TOKENS = 8
WINDOWS = {
    "max_position_embeddings": 2048,
    "num_hidden_layers": 5,
    "sliding_window": 100,
    "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 3,
}
PROMPT_LENS = (1700, 40, 700, 1100, 513, 1300)


@pytest.mark.parametrize("budget", [4096, 700])
@pytest.mark.parametrize("family", ["gemma3_text", "gemma3n_text"])
def test_same_answers_with_cuts_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, budget: int
) -> None:
    if family == "gemma3n_text":
        folder = make_checkpoint(TinyRow(model_type=family, config=READERS), tmp_path).directory
    else:
        folder = save_checkpoint(build_reach(family, **WINDOWS), tmp_path)
    num_left: list[int] = []
    original = CutRows.list_sent

    def list_sent(rows: CutRows) -> list[Int64Array]:
        num_left.append(len(rows.tokens))
        return original(rows)

    monkeypatch.setattr(CutRows, "list_sent", list_sent)
    flags = {
        "max_num_batched_tokens": budget,
        "max_model_len": 2000,
        "num_gpu_blocks_override": 2000,
    }
    with run_engine(folder, "cuda", dtype="float32", **flags) as engine:
        whole = generate(engine, make_prompts(PROMPT_LENS), NUM_TOKENS, sampling=WITH_PROMPTS)
        assert not num_left
    with run_engine(folder, "cuda", dtype="float32", **flags) as engine:
        cut = generate(engine, make_prompts(PROMPT_LENS), NUM_TOKENS, sampling=GREEDY)
        assert num_left
        again = generate(engine, make_prompts(PROMPT_LENS), NUM_TOKENS, sampling=GREEDY)
    for answer in whole:
        assert answer.prompt_logprobs
        answer.prompt_logprobs = []
    for found in (cut, again):
        agreed = sum(compare(a, b, 2e-3) for a, b in zip(found, whole, strict=True))
        assert agreed >= 0.9 * NUM_TOKENS * len(whole)
