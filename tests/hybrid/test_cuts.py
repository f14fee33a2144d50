"""Upper layers leave out what no answer can see: the answers are the same, bit for bit.

Every cache is filled with NaN when its blocks are handed out, so that a layer which read a row that
was left out would show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hybrid.engines import run_engine
from tests.hybrid.models.tiny import BASE, TinyRow, make_checkpoint
from tests.utils.fixtures_models import build_reach, make_reach_prompt, save_checkpoint
from vllm.cache_spec import (
    CacheField,
    Chunk,
    Full,
    LayerCacheSpec,
    Lifetime,
    Nothing,
    State,
    Window,
)
from vllm.engine import core
from vllm.engine.core import EngineCore
from vllm.hybrid.reach import find_last_keeper, find_reaches
from vllm.model_executor.models.blocks import DecoderBlock
from vllm.model_executor.models.gemma3n_parts import SparseMlpBlock
from vllm.sequence import SequenceRequest
from vllm.step import RowSampling
from vllm.types import DType
from vllm.worker import layer_setup

WINDOW = 100
SHAPES: dict[str, dict[str, Any]] = {
    "windows_above": {
        "num_hidden_layers": 5,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 3,
    },
    "windows_between": {
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
READERS = {
    **BASE,
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"],
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 300,
    "altup_num_inputs": 3,
    "laurel_rank": 8,
    "max_position_embeddings": 2048,
}
LENS = (1700, 40, 700, 1100, 513)


@pytest.fixture(scope="module", params=[*sorted(SHAPES), "readers"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "readers":
        row = TinyRow(model_type="gemma3n_text", config=READERS)
        return make_checkpoint(row, tmp_path_factory.mktemp("readers")).directory
    model = build_reach("gemma3_text", max_position_embeddings=2048, **SHAPES[request.param])
    return save_checkpoint(model, tmp_path_factory.mktemp(request.param))


@contextmanager
def count_tokens() -> Iterator[Counter[int]]:
    """Count the tokens that each layer's MLP is given."""
    found: Counter[int] = Counter()
    original = DecoderBlock.run_mlp

    def run_mlp(self: DecoderBlock, delta: Any, residual_TE: torch.Tensor) -> Any:
        found[self._layer] += len(residual_TE)
        return original(self, delta, residual_TE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderBlock, "run_mlp", run_mlp)
        patch.setattr("vllm.model_executor.models.fused_run.can_lower", lambda block: False)
        yield found


@contextmanager
def start(checkpoint: Path, *, cuts: bool, **flags: Any) -> Iterator[EngineCore]:
    with pytest.MonkeyPatch.context() as patch:
        if not cuts:
            patch.setattr(layer_setup, "find_reaches", lambda specs: ())
            patch.setattr(layer_setup, "find_last_keeper", lambda specs, windows: None)
            patch.setattr(core, "find_group_reaches", lambda specs, groups: ())
        options = {"max_model_len": 2000, "max_num_batched_tokens": 2048, **flags}
        with run_engine(checkpoint, **options) as engine:
            yield engine


def answer(engine: EngineCore, requests: list[SequenceRequest]) -> dict[tuple[str, int], Any]:
    """Return tokens, their logprobs and those of the prompt of every branch."""
    for request in requests:
        engine.scheduler.add(request)
    found: dict[tuple[str, int], Any] = {}
    while engine.has_work:
        for result in engine.step():
            assert result.error is None
            tokens, logprobs, prompt = found.setdefault(
                (result.request_id, result.branch), ([], [], [])
            )
            tokens += result.token_ids
            logprobs += [entry.logprobs for entry in result.logprobs or ()]
            prompt += [entry.logprobs for entry in result.prompt_logprobs or ()]
    return found


def ask(
    name: str, prompt: list[int], *, n: int = 1, num_tokens: int = 6, **sampling: Any
) -> SequenceRequest:
    return SequenceRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=RowSampling(**{"temperature": 0.0, "num_logprobs": 2, "seed": 7, **sampling}),
        n=n,
        max_tokens=num_tokens,
    )


def make_requests() -> list[SequenceRequest]:
    """Long and short ones, branches, prompt logprobs, and prompts that fork from others."""
    prompts = [make_reach_prompt(n, seed=n) for n in LENS]
    requests = [ask(str(i), prompt) for i, prompt in enumerate(prompts)]
    requests.append(ask("branches", make_reach_prompt(1400, seed=2), n=3, temperature=1.0))
    requests.append(ask("scored", make_reach_prompt(900, seed=3), num_prompt_logprobs=1))
    requests.append(ask("fork", prompts[0][:1210] + make_reach_prompt(300, seed=4)))
    return requests


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"max_num_batched_tokens": 600},
        {"max_num_batched_tokens": 130, "max_num_seqs": 3},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 333},
        {"num_gpu_blocks_override": 190, "max_num_batched_tokens": 512},
    ],
    ids=["whole", "chunks", "small_chunks", "no_prefix_cache", "preempted"],
)
def test_answers_are_the_same_bits(checkpoint: Path, flags: dict[str, Any]) -> None:
    with start(checkpoint, cuts=False, **flags) as engine:
        expected = answer(engine, make_requests())
    with start(checkpoint, cuts=True, **flags) as engine:
        assert answer(engine, make_requests()) == expected
        again = answer(engine, make_requests())  # from the prefix cache, where there is one
    assert again == expected


def test_only_what_an_answer_sees_is_computed(tmp_path: Path) -> None:
    """Behind layer 1 go on the last 1 + 3 · 99 tokens of 1,700, rounded to 512; then fewer."""
    shape = SHAPES["windows_above"]
    model = build_reach("gemma3_text", max_position_embeddings=2048, **shape)
    directory = save_checkpoint(model, tmp_path)
    with count_tokens() as counted, start(directory, cuts=True) as engine:
        answer(engine, [ask("0", make_reach_prompt(1700), num_tokens=1)])
    first = (1700 // 64 * 64 - (1 + 3 * (WINDOW - 1))) // 512 * 512
    assert first == 1024
    assert counted == {0: 1700, 1: 1700 - first, 2: 1700 - first, 3: 1700 - 1536, 4: 1}


def test_layers_that_keep_nothing_are_run_for_sampled_tokens(tmp_path: Path) -> None:
    """Layers 4 to 6 of Gemma 3n read the caches of layers 2 and 3."""
    row = TinyRow(model_type="gemma3n_text", config=READERS)
    directory = make_checkpoint(row, tmp_path).directory
    counted: Counter[int] = Counter()
    original = SparseMlpBlock.forward

    def forward(self: SparseMlpBlock, x_TE: torch.Tensor) -> torch.Tensor:
        counted[id(self)] += len(x_TE)
        return original(self, x_TE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseMlpBlock, "forward", forward)
        with start(directory, cuts=True, max_num_batched_tokens=600) as engine:
            answer(engine, [ask("0", make_reach_prompt(1000), num_tokens=3)])
    assert sorted(counted.values()) == [3] * 3 + [1002] * 4


def test_a_prompt_that_forks_is_computed_from_there(tmp_path: Path) -> None:
    """Where an earlier prompt went another way, the rows for a third one are made."""
    shape = SHAPES["windows_above"]
    model = build_reach("gemma3_text", max_position_embeddings=2048, **shape)
    directory = save_checkpoint(model, tmp_path)
    common = make_reach_prompt(1280, seed=1)
    requests = [ask(str(i), common + make_reach_prompt(600, seed=10 + i)) for i in range(4)]
    with start(directory, cuts=False) as engine:
        expected = [answer(engine, [request]) for request in requests]
    with start(directory, cuts=True) as engine:
        hits = []
        for request, answers in zip(requests, expected, strict=True):
            before = engine.scheduler.stats().num_prefix_hit_tokens
            assert answer(engine, [request]) == answers
            hits.append(engine.scheduler.stats().num_prefix_hit_tokens - before)
    assert hits == [0, 0, 1280, 1280]


def test_rows_that_were_left_out_are_no_hit(tmp_path: Path) -> None:
    """The step ends at 512 with rows in the cache that the upper layers have not computed."""
    shape = SHAPES["windows_above"]
    model = build_reach("gemma3_text", max_position_embeddings=2048, **shape)
    directory = save_checkpoint(model, tmp_path)
    prompt = make_reach_prompt(1700)
    requests = [ask("0", prompt), ask("1", prompt[:530] + make_reach_prompt(99, seed=5))]
    flags = {"max_num_batched_tokens": 512}
    with start(directory, cuts=False, **flags) as engine:
        expected = [answer(engine, [request]) for request in requests]
        assert engine.scheduler.stats().num_prefix_hit_tokens == 512
    with start(directory, cuts=True, **flags) as engine:
        assert [answer(engine, [request]) for request in requests] == expected
        assert engine.scheduler.stats().num_prefix_hit_tokens == 0


@pytest.mark.parametrize(
    ("lifetimes", "reaches"),
    [
        ([Full(), Window(tokens=8), Window(tokens=4)], ((0, 11), (1, 4))),
        ([Full(), Window(tokens=8), Nothing()], ((0, 8),)),
        ([Window(tokens=8), Window(tokens=1), Full()], ()),
        ([Full(), Window(tokens=8, sinks=2), Window(tokens=4)], ((1, 4),)),
        ([Full(), Chunk(tokens=8), Window(tokens=4)], ((1, 4),)),
        ([State(), Window(tokens=8)], ()),
        ([Nothing(), Full()], ()),
    ],
)
def test_reaches(lifetimes: list[Lifetime], reaches: tuple[tuple[int, int], ...]) -> None:
    fields = (CacheField(name="k", shape=(1,), dtype=DType.FLOAT32),)
    specs = [
        LayerCacheSpec(layer=i, fields=fields, lifetime=lifetime)
        for i, lifetime in enumerate(lifetimes)
    ]
    assert find_reaches(specs) == reaches


def test_layers_that_read_others() -> None:
    """What an owner keeps is written below its readers, for every token."""
    fields = (CacheField(name="k", shape=(1,), dtype=DType.FLOAT32),)
    window, chunk = Window(tokens=8), Chunk(tokens=8)
    specs = [
        LayerCacheSpec(layer=0, fields=fields, lifetime=window),
        LayerCacheSpec(layer=1, fields=(), lifetime=window, reads_from=0),
        LayerCacheSpec(layer=2, fields=fields, lifetime=window),
        LayerCacheSpec(layer=3, fields=(), lifetime=Nothing()),
        LayerCacheSpec(layer=4, fields=(), lifetime=window, reads_from=0),
        LayerCacheSpec(layer=5, fields=(), lifetime=chunk, reads_from=0),
    ]
    assert find_reaches(specs[:3]) == ((1, 8),)
    assert find_last_keeper(specs[:4], {4: 7}) is None
    assert find_last_keeper(specs[:5], {4: 7}) == 2
    assert find_last_keeper(specs[:5], {4: 8}) is None, "a later step sees one row less"
    assert find_last_keeper(specs, {4: 7, 5: 0}) is None
