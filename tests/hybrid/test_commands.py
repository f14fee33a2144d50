"""`vllm hybrid` and `vllm bench hybrid`, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hybrid.engines import generate, run_engine, write_json
from tests.utils.fixtures_models import build_reach, make_reach_prompt, save_checkpoint
from vllm.core.cache_manager import CacheManager
from vllm.core.capacity import make_layout
from vllm.core.scheduler import Scheduler
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.hybrid import parse_bytes, parse_layers
from vllm.errors import ConfigError
from vllm.hybrid.grouping import group_layers
from vllm.scripts import main
from vllm.sequence import SequenceRequest
from vllm.step import RowOutput, RowSampling, StepOutput
from vllm.worker.hybrid_plan import read_specs

C45: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 320,
    "num_hidden_layers": 6,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "sliding_window": 1024,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
GEMMA3_4B = {
    **C45,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "layer_types": [
        "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(34)
    ],
}


def write_model(directory: Path, config: dict[str, Any]) -> Path:
    """Write a checkpoint that is nothing but a config."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """Run a command and return the one JSON object that it prints."""
    assert main([*args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def c45(tmp_path: Path) -> Path:
    return write_model(tmp_path / "c45", C45)


def test_c45_sliding_layers_are_not_sized_as_full(
    c45: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json(
        capsys, "hybrid", "plan", str(c45), "--max-model-len", "8192", "--kv-bytes", "120MiB"
    )
    vanilla, hybrid = found["vanilla"], found["hybrid"]
    assert vanilla["bytes_per_sequence"] == 12 << 20
    assert hybrid["bytes_per_sequence"] <= 4 << 20
    assert 9 <= vanilla["max_concurrency"] <= 10
    assert hybrid["max_concurrency"] >= 30
    assert hybrid["tokens_at_max_len"] >= 30 * 8192
    assert {g["name"]: g["keeps"] for g in hybrid["groups"]} == {
        "window_1024": "window_1024",
        "full": "full",
    }
    assert [g["name"] for g in vanilla["groups"]] == ["full"]
    assert all(g["waste"] <= 0.02 for g in hybrid["groups"])


def test_errors_name_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["hybrid", "plan", "x"])
    error = "vllm hybrid plan: error: the following arguments are required: --kv-bytes"
    assert error in capsys.readouterr().err


def test_a_load_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "hybrid", "--model", "x", "--output-len", "0"])
    assert "argument --output-len: expected a number" in capsys.readouterr().err


def test_c45_a_window_is_capped_by_the_length(
    c45: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json(
        capsys, "hybrid", "plan", str(c45), "--max-model-len", "128", "--kv-bytes", "1MiB"
    )
    assert found["hybrid"]["bytes_per_sequence"] == 6 * 128 * 256
    assert found["hybrid"]["bytes_per_sequence"] == found["vanilla"]["bytes_per_sequence"]


def count_admitted(model: Path, max_model_len: int, kv_bytes: int, wanted: int) -> int:
    """Return how many sequences of full length a scheduler really runs at once."""
    config = EngineArgs(
        model=str(model), skip_tokenizer_init=True, max_model_len=max_model_len,
        enable_prefix_caching=False, max_num_batched_tokens=8192, hybrid_mode=True,
    ).create_engine_config()  # fmt: skip
    groups = group_layers(read_specs(config, config.hybrid), config.hybrid, 16)
    layout, _ = make_layout(
        [groups], [kv_bytes], max_model_len=max_model_len, max_num_batched_tokens=8192
    )
    cache = CacheManager(groups, layout, enable_prefix_caching=False)
    scheduler = Scheduler(config.scheduler_config, cache)
    for number in range(wanted):
        scheduler.add(
            SequenceRequest(
                request_id=str(number), prompt_token_ids=[7] * (max_model_len - 8),
                sampling=RowSampling(temperature=0.0), max_tokens=8,
            )
        )  # fmt: skip
    for _ in range(2 + wanted * (max_model_len // 8192 + 1)):
        plan = scheduler.schedule()
        rows = [RowOutput(seq_id=r.seq_id, token_ids=[5] * r.num_samples) for r in plan.rows]
        stats = scheduler.stats()
        if stats.num_running == wanted:
            assert stats.num_preemptions == 0
            return wanted
        scheduler.update(plan, StepOutput(step=plan.step, rows=rows))
    return stats.num_running


def test_c45_announced_sequences_are_admitted(
    c45: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json(
        capsys, "hybrid", "plan", str(c45), "--max-model-len", "2048", "--kv-bytes", "24MiB"
    )
    announced = int(found["hybrid"]["max_concurrency"])
    assert announced > found["vanilla"]["max_concurrency"]
    assert count_admitted(c45, 2048, 24 << 20, announced) == announced


def test_gemma3_4b_at_32768_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "gemma3-4b", GEMMA3_4B)
    found = run_json(
        capsys, "hybrid", "plan", str(model), "--max-model-len", "32768", "--kv-bytes", "18.58GiB"
    )
    assert found["hybrid"]["max_concurrency"] >= 24
    assert found["vanilla"]["max_concurrency"] < 5


def test_plan_as_a_table(c45: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hybrid", "plan", str(c45), "--kv-bytes", "120MiB"]) == 0
    text = capsys.readouterr().out
    assert "vanilla          hybrid" in text
    assert "hybrid group 'window_1024': keeps window_1024, [0, 1, 2, 3, 4]" in text


def test_inspect(c45: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "hybrid", "inspect", str(c45))
    assert found["bytes_per_token"] == 6 * 256
    assert found["bytes_per_sequence"] == 0
    assert [entry["keeps"] for entry in found["layers"]] == ["window_1024"] * 5 + ["full"]
    assert main(["hybrid", "inspect", str(c45)]) == 0
    assert "0-4         window_1024" in capsys.readouterr().out


def test_what_convert_writes_is_served(tmp_path: Path) -> None:
    model = build_reach("qwen2", num_hidden_layers=4)
    source = save_checkpoint(model, tmp_path / "source")
    target = tmp_path / "target"
    assert main([
        "hybrid", "convert", str(source), "-o", str(target), "--layers", "full=0-1", "--layers",
        "flash3=2,3", "--layers", "dense_head=4", "--ratio", "flash3=0.35", "--block",
        "full=16", "--block", "flash3=8", "--block", "dense_head=0",
    ]) == 0  # fmt: skip
    config = json.loads((target / "config.json").read_text())
    assert config["hybrid_attention_layers"] == {
        "full": [0, 1], "flash3": [2, 3], "dense_head": [4],
    }  # fmt: skip
    file = target / "hybrid_config.json"
    assert json.loads(file.read_text()) == {
        "block_size_map": {"full": 16, "flash3": 8, "dense_head": 0},
        "kv_cache_ratio": {"flash3": 0.35},
    }
    with run_engine(target, hybrid_mode=True, hybrid_config=str(file)) as engine:
        assert [g.name for g in engine.ready.groups] == ["full", "flash3"]
        assert len(generate(engine, [make_reach_prompt(20)])[0]) == 12


def test_convert_takes_the_checkpoints_own_types(
    c45: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hybrid", "convert", str(c45), "-o", str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hybrid_attention_layers"] == {"window_1024": [0, 1, 2, 3, 4], "full": [5]}
    assert main(["hybrid", "convert", str(c45), "-o", str(c45)]) == 1
    assert "is the checkpoint itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"), [("18.58GiB", 19950123089), ("512M", 512 << 20), ("1e9", 10**9), ("7", 7)]
)
def test_bytes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


def test_ranges_of_layers() -> None:
    assert parse_layers("0-2,5") == [0, 1, 2, 5]
    for wrong in ("", "3-1", "a", "1,,2"):
        with pytest.raises(ConfigError, match="no layer and no range"):
            parse_layers(wrong)


def test_bench_compares_the_same_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the chart needs matplotlib")
    model = save_checkpoint(build_reach("llama", num_hidden_layers=2), tmp_path / "model")
    file = write_json(
        tmp_path / "h.json",
        {"hybrid_attention_layers": {"a": [0], "b": [1]}, "kv_cache_ratio": {"b": 0.1}},
    )
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    assert main([
        "bench", "hybrid", str(model), "--hybrid-config", file, "--input-len", "100",
        "--output-len", "8", "--batch-sizes", "1", "3", "--kv-bytes", "2MiB", "--max-model-len",
        "256", "--dtype", "float32", "--output-json", str(out), "--output-png", str(png),
    ]) == 0  # fmt: skip
    result = json.loads(out.read_text())
    vanilla, hybrid = result["vanilla"], result["hybrid"]
    assert hybrid["max_concurrency"] > vanilla["max_concurrency"]
    assert hybrid["bytes_per_sequence"] < vanilla["bytes_per_sequence"]
    for size in ("1", "3"):
        before, after = vanilla["batches"][size], hybrid["batches"][size]
        assert after["kv_held_bytes"] < before["kv_held_bytes"]
        assert after["kv_unreadable_share"] < before["kv_unreadable_share"]
        assert before["peak_running"] == after["peak_running"] == int(size)
        assert before["p99_token_ms"] >= before["p50_token_ms"] > 0
        assert min(before["decode_tokens_per_s"], after["decode_tokens_per_s"]) > 0
    assert png.stat().st_size > 1000
    text = capsys.readouterr().out
    assert "batch of 3" in text
    assert "tokens a second" in text
