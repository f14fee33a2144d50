"""Hybrid mode through a whole engine: it answers as vanilla and transformers do, in less memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.hybrid.engines import generate, name_layers, reference, run_engine, write_json
from tests.utils.fixtures_models import build_reach, make_reach_prompt, save_checkpoint
from vllm.errors import ConfigError, KernelError

NATIVE: dict[str, dict[str, Any]] = {
    "mistral": {"num_hidden_layers": 2, "sliding_window": 20},
    "gemma2": {"num_hidden_layers": 4, "sliding_window": 20},
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 20},
    "qwen2": {
        "num_hidden_layers": 4,
        "sliding_window": 20,
        "use_sliding_window": True,
        "max_window_layers": 2,
    },
}
LENS = (130, 1, 17, 64, 61)
LAYERS = {"full": [0, 1], "flash3": [2, 3], "dense_head": [4]}
SIZES = {"full": 16, "flash3": 8, "dense_head": 0}


@pytest.fixture(scope="module", params=sorted(NATIVE))
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A checkpoint with windows of its own, prompts, and transformers' answers."""
    model = build_reach(request.param, **NATIVE[request.param])
    directory = save_checkpoint(model, tmp_path_factory.mktemp(request.param))
    prompts = [make_reach_prompt(n, seed=n) for n in LENS]
    prompts.append(prompts[0][:128] + prompts[3])
    return directory, prompts, [reference(model, prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory):
    """A uniform Qwen 2 whose config names the types of its layers."""
    model = build_reach("qwen2", num_hidden_layers=4)
    directory = save_checkpoint(model, tmp_path_factory.mktemp("named"))
    name_layers(directory, LAYERS)
    return directory, model


@pytest.mark.parametrize("budget", [17, 512])
def test_native_windows_answer_as_transformers_does(native: Any, budget: int) -> None:
    directory, prompts, answers = native
    with run_engine(directory, max_num_batched_tokens=budget) as engine:
        for _ in range(2):  # the second time from the prefix cache
            assert generate(engine, prompts) == answers
        windows = [g for g in engine.scheduler.stats().groups if g.name == "window_20"]
        assert len(windows) == 1
        assert windows[0].num_held_blocks == 0


def test_vanilla_is_one_uniform_cache_with_the_same_answers(native: Any) -> None:
    directory, prompts, answers = native
    with run_engine(directory, hybrid_mode=False) as engine:
        assert generate(engine, prompts) == answers
        assert [g.name for g in engine.scheduler.stats().groups] == ["full"]


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
def test_each_type_has_its_blocks_and_its_kernel(
    qwen2: Any, kernel: str, tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    directory, model = qwen2
    file = write_json(
        tmp_path / "hybrid.json",
        {
            "block_size_map": SIZES,
            "layer_impl_map": {"full": "torch", "flash3": kernel},
        },
    )
    prompts = [make_reach_prompt(n, seed=n) for n in LENS]
    with (
        caplog.at_level(logging.INFO, "vllm"),
        run_engine(directory, hybrid_mode=True, hybrid_config=file) as engine,
    ):
        assert generate(engine, prompts) == [reference(model, prompt) for prompt in prompts]
        groups = {g.name: g for g in engine.ready.groups}
        assert list(groups) == ["full", "flash3"]
        assert [k.kernel for k in engine.ready.kernels] == ["torch"] * 2 + [kernel] * 2
        assert {g.name: g.block_tokens for g in engine.scheduler.stats().groups} == {
            "full": 16,
            "flash3": 8,
        }
    line = "Using hybrid attention mode with block_size_map={'full': 16, 'flash3': 8}"
    assert [r.getMessage() for r in caplog.records].count(line) == 1


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("budget", [23, 512])
def test_a_ratio_is_a_window_with_sinks(
    kernel: str, sinks: int, budget: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ratio 0.05 of 400 tokens: the last 20 and the first ones, exactly."""
    model = build_reach("llama", num_hidden_layers=2)
    directory = save_checkpoint(model, tmp_path / "model")
    content: dict[str, Any] = {
        "hybrid_attention_layers": {"short": [0, 1]},
        "kv_cache_ratio": {"short": 0.05},
        "layer_impl_map": {"short": kernel},
        "block_size_map": {"short": 8},
    }
    if sinks:
        content["kv_sink_tokens"] = {"short": sinks}
    file = write_json(tmp_path / "hybrid.json", content)
    prompts = [make_reach_prompt(n, seed=n) for n in (90, 19, 20, 21, 5)]
    expected = [reference(model, prompt, window=20, sinks=sinks) for prompt in prompts]
    assert expected[0] != reference(model, prompts[0]), "the window would not be seen"
    with run_engine(directory, hybrid_config=file, max_num_batched_tokens=budget) as engine:
        assert generate(engine, prompts) == expected


def test_a_reduced_layer_is_warned_about_once(
    qwen2: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, _ = qwen2
    file = write_json(tmp_path / "h.json", {"kv_cache_ratio": {"flash3": 0.11}})
    for _ in range(2):
        with run_engine(directory, hybrid_config=file) as engine:
            assert generate(engine, [[5, 6, 7]])
    warned = [r.getMessage() for r in caplog.records if "kv_cache_ratio" in r.getMessage()]
    assert len(warned) == 1
    assert "[2, 3]" in warned[0]
    assert "44 tokens" in warned[0]


def test_gpu_kernels_are_replaced_on_a_cpu_or_refused_when_strict(
    qwen2: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, _ = qwen2
    file = write_json(
        tmp_path / "h.json", {"layer_impl_map": {"full": "flashattn", "flash3": "flashattn3"}}
    )
    with run_engine(directory, hybrid_config=file) as engine:
        assert {k.kernel for k in engine.ready.kernels} == {"cpu"}
        assert all("cuda" in k.note for k in engine.ready.kernels)
    warned = [r.getMessage() for r in caplog.records if "instead" in r.getMessage()]
    assert len(warned) == 2
    assert any("layers 2-3" in w and "flashattn3" in w and "'cpu'" in w for w in warned)
    with (
        pytest.raises(KernelError, match=r"layers 0-1 cannot have .*flashattn"),
        run_engine(directory, hybrid_config=file, hybrid_strict=True),
    ):
        pass


@pytest.mark.parametrize("level", ["off", "info", "debug"])
def test_trace_levels(qwen2: Any, level: str, caplog: pytest.LogCaptureFixture) -> None:
    directory, _ = qwen2
    with (
        caplog.at_level(logging.INFO, "vllm"),
        run_engine(directory, hybrid_mode=True, trace_level=level) as engine,
    ):
        generate(engine, [make_reach_prompt(40)], 2)
    lines = [r.getMessage() for r in caplog.records if "alloc" in r.getMessage()]
    each = [line for line in lines if "allocates" in line]
    assert len(each) == (2 if level == "debug" else 0)
    assert len(lines) - len(each) == (0 if level == "off" else 1)
    if level == "debug":
        assert "group=full count=3 ids=[0, 1, 2]" in each[0]
        assert "group=flash3 count=3" in each[1]


def test_a_block_size_that_the_kernels_do_not_take(qwen2: Any, tmp_path: Path) -> None:
    directory, _ = qwen2
    file = write_json(tmp_path / "h.json", {"block_size_map": {"full": 24, "flash3": 8}})
    prompt = make_reach_prompt(60)
    with run_engine(directory, hybrid_config=file) as engine:  # the CPU's kernels take any size
        assert len(generate(engine, [prompt])[0]) == 12
    file = write_json(tmp_path / "h.json", {"block_size_map": {"full": 0, "flash3": 8}})
    with (
        pytest.raises(ConfigError, match="layer 0 is of type 'full'"),
        run_engine(directory, hybrid_config=file),
    ):
        pass
