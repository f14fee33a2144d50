"""What a running hybrid engine says of itself: /stats, gauges by group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.hybrid.engines import write_json
from tests.utils.fixtures_models import build_reach, make_reach_prompt, save_checkpoint
from vllm import LLM, SamplingParams
from vllm.engine.metrics import PrometheusStatLogger, make_stats
from vllm.engine.stats import EngineStats, IterationStats

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stats")
    return save_checkpoint(build_reach("llama", num_hidden_layers=4), directory)


def start(checkpoint: Path, **options: Any) -> LLM:
    return LLM(
        model=str(checkpoint), skip_tokenizer_init=True, dtype="float32", max_model_len=256,
        max_num_seqs=4, **options,
    )  # fmt: skip


def test_stats_of_a_hybrid_engine(checkpoint: Path, tmp_path: Path) -> None:
    file = write_json(
        tmp_path / "h.json",
        {
            "hybrid_attention_layers": {"full": [0, 1], "recent": [2, 3], "dense_head": [4]},
            "block_size_map": {"full": 16, "recent": 8, "dense_head": 0},
            "kv_cache_ratio": {"recent": 0.125},
            "layer_impl_map": {"full": "torch"},
        },
    )
    llm = start(checkpoint, hybrid_mode=True, hybrid_config=file)
    before = llm.llm_engine.stats()
    assert before.num_free_gpu_blocks == before.num_total_gpu_blocks > 0
    llm.generate([{"prompt_token_ids": make_reach_prompt(100)}], PARAMS, use_tqdm=False)
    stats = llm.llm_engine.stats()
    assert stats.scheduler_running
    assert (stats.num_running_requests, stats.num_waiting_requests) == (0, 0)
    assert list(stats.blocks_by_group) == ["full", "recent"]
    assert stats.num_free_gpu_blocks == stats.num_total_gpu_blocks
    full, recent = stats.cache_groups["full"], stats.cache_groups["recent"]
    assert (full["block_tokens"], recent["block_tokens"]) == (16, 8)
    # Room for all of 256 tokens, and for 32 rows in blocks of 8 with what a step adds to them.
    assert full["blocks_per_sequence"] == 16
    assert recent["blocks_per_sequence"] < 16
    assert [stats.kernels[i]["kernel"] for i in range(4)] == ["torch", "torch", "cpu", "cpu"]
    assert stats.hybrid["mode"] == "hybrid"
    assert stats.hybrid["reduced_layers"] == [2, 3]
    assert stats.hybrid["layer_types"] == {
        "full": {"layers": [0, 1], "keeps": "full", "is_reduced": False},
        "recent": {"layers": [2, 3], "keeps": "window_32", "is_reduced": True},
    }
    assert 0.0 <= stats.fragmentation <= 1.0


@pytest.mark.parametrize(("mode", "named"), [(None, "uniform"), (False, "vanilla")])
def test_a_uniform_engine_says_so(checkpoint: Path, mode: bool | None, named: str) -> None:
    stats = start(checkpoint, hybrid_mode=mode).llm_engine.stats()
    assert stats.hybrid == {"mode": named, "layer_types": {}, "reduced_layers": []}
    assert list(stats.cache_groups) == ["full"]


def test_gauges_by_group() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusStatLogger(labels={"model_name": "m"}, registry=registry)
    engine = EngineStats(
        fragmentation=0.25,
        blocks_by_group={"full": {"total": 10, "free": 7}, "recent": {"total": 40, "free": 40}},
    )
    metrics.log(make_stats(engine, IterationStats(), 0))
    text = generate_latest(registry).decode()
    assert 'vllm:kv_group_blocks{group="full",model_name="m",state="free"} 7.0' in text
    assert 'vllm:kv_group_blocks{group="recent",model_name="m",state="total"} 40.0' in text
    assert 'vllm:kv_cache_fragmentation{model_name="m"} 0.25' in text


def test_the_python_interface_of_the_mission(checkpoint: Path) -> None:
    llm = start(checkpoint, hybrid_mode=True)
    outputs = llm.generate(
        [{"prompt_token_ids": [5, 6, 7]}], sampling_params={"max_tokens": 3}, use_tqdm=False
    )
    assert len(outputs[0].outputs[0].token_ids) <= 3
