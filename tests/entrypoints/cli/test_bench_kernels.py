"""`vllm bench kernels`: tiny measurements, the table it saves, and the choice that follows it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from vllm.attention import measured_ranks
from vllm.attention.backends.abstract import KernelQuery
from vllm.attention.backends.torch_sdpa import TorchBackend
from vllm.attention.measure import cells, clock, workload
from vllm.attention.selector import choose_kernel
from vllm.entrypoints.cli.bench import kernels, main
from vllm.types import DType

LOADS = [
    "--batch-sizes", "1", "3", "--context-lens", "40", "--prompt-lens", "20", "--runs", "3",
    "--device", "cpu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workload, "COLD_BYTES", 1 << 16)
    monkeypatch.setattr(clock, "_COPY_BYTES", {"cpu": 1 << 22})
    monkeypatch.setattr(clock, "_MATRIX_SIZE", {"cpu": 64})
    monkeypatch.setattr(kernels, "TYPICAL_HEADS", ((4, 2, 32),))
    monkeypatch.setattr(kernels, "TYPICAL_WINDOWS", (0, 16))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    measured_ranks._load_table.cache_clear()


def run(tmp_path: Path, *flags: str) -> dict[str, Any]:
    """Run the command and return what it wrote."""
    out = tmp_path / "kernels.json"
    assert main(["kernels", *flags, *LOADS, "--output-json", str(out)]) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_typical_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the chart needs matplotlib")
    png = tmp_path / "kernels.png"
    result = run(tmp_path, "--dtype", "float32", "--output-png", str(png))
    assert result["model"] is None
    assert result["rates"]["float32"]["copy_bytes_per_s"] > 1e6
    assert [shape["query"]["window"] for shape in result["shapes"]] == [0, 16]
    for shape in result["shapes"]:
        assert set(shape["refusals"]) == {"flashattn3", "flashattn", "triton", "xformers"}
        places = [(c["phase"], c["batch_size"], c["length"]) for c in shape["cells"]]
        assert places == [("decode", 1, 40), ("decode", 3, 40), ("prefill", 1, 20)]
        for cell in shape["cells"]:
            assert set(cell["kernels"]) == {"cpu", "torch"}
            assert not cell["faults"]
            for found in cell["kernels"].values():
                assert 0 < found["min_us"] <= found["median_us"]
                assert found["num_runs"] == 3
                assert found["bytes_per_s"] == pytest.approx(
                    1e6 * cell["bytes"] / found["median_us"]
                )
    full, windowed = (shape["cells"][0] for shape in result["shapes"])
    row_bytes = 2 * 2 * 32 * 4
    assert full["bytes"] - windowed["bytes"] == (40 - 16) * row_bytes
    assert full["flops"] == 4 * 40 * 4 * 32
    assert result["shapes"][1]["cells"][2]["flops"] == 4 * (sum(range(17)) + 4 * 16) * 4 * 32
    assert [e["has_window"] for e in result["ranks"]] == [False, True]
    assert all(min(e["relative_times"].values()) >= 1 for e in result["ranks"])
    assert png.stat().st_size > 1000
    assert "of matmul" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists(), "nothing is saved unless asked"


def test_layers_of_a_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 64,
        "intermediate_size": 64, "vocab_size": 320, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    result = run(tmp_path, str(model), "--block-size", "32", "--save")
    assert [shape["layers"] for shape in result["shapes"]] == [[0, 1], [2]]
    assert [shape["query"]["window"] for shape in result["shapes"]] == [16, 0]
    assert {shape["query"]["block_tokens"] for shape in result["shapes"]} == {32}
    assert {shape["query"]["dtype"] for shape in result["shapes"]} == {"bfloat16"}
    [saved] = (tmp_path / "cache" / "kernels").iterdir()
    assert len(json.loads(saved.read_text())["ranks"]) == 2


def test_the_choice_follows_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        measured_ranks,
        "rank_cells",
        lambda key, cells: measured_ranks.KernelRanks(
            key=key, relative_times={"cpu": 2.0, "torch": 1.0}
        ),
    )
    run(tmp_path, "--dtype", "float32", "--save")
    query = KernelQuery(
        num_heads=8, num_kv_heads=8, head_size=32, dtype=DType.FLOAT32, kv_dtype=DType.FLOAT32,
        scale=0.3,
    )  # fmt: skip
    assert choose_kernel(query, None).kernel == "torch"


def test_a_kernel_that_fails_is_named_and_has_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no memory left\nand more")

    run(tmp_path)  # what is proved at the first use of a kernel is proved
    monkeypatch.setattr(TorchBackend, "forward", fail)
    result = run(tmp_path)
    for shape in result["shapes"]:
        for cell in shape["cells"]:
            assert set(cell["kernels"]) == {"cpu"}
            assert cell["faults"] == {"torch": "RuntimeError: no memory left"}
    assert [set(entry["relative_times"]) for entry in result["ranks"]] == [{"cpu"}, {"cpu"}]
    assert "RuntimeError: no memory left" in capsys.readouterr().out


def test_kernels_that_fail_while_they_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> float:
        raise RuntimeError

    monkeypatch.setattr(cells, "_time_layer", lambda *args: 1e-3)
    monkeypatch.setattr(cells, "time_run", fail)
    result = run(tmp_path)
    faults = [cell["faults"] for shape in result["shapes"] for cell in shape["cells"]]
    assert faults == [{"cpu": "RuntimeError: ", "torch": "RuntimeError: "}] * 6
    assert result["ranks"] == []


def test_a_kernel_far_behind_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"cpu": 1e-3, "torch": 1.0}
    monkeypatch.setattr(cells, "_time_layer", lambda work, name, device: seconds[name])
    result = run(tmp_path)
    for found in (cell["kernels"] for shape in result["shapes"] for cell in shape["cells"]):
        assert found["cpu"]["num_runs"] == 3
        assert found["torch"]["num_runs"] == 1
        assert found["torch"]["median_us"] == 1e6


def test_loads_that_have_no_room_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "_ARENA_SHARE", 0.0)
    result = run(tmp_path, "--save")
    assert all(c["faults"]["cpu"] == "no room" for s in result["shapes"] for c in s["cells"])
    assert result["ranks"] == []


def test_ratios_count_and_not_microseconds() -> None:
    key = measured_ranks.RankKey(head_size=64, has_window=False, dtype=DType.BFLOAT16)
    entries = [
        measured_ranks.CellTimes(phase="decode", times={"a": 1.0, "b": 2.0}),
        measured_ranks.CellTimes(phase="decode", times={"a": 1.0, "b": 8.0, "c": 9.0}),
        measured_ranks.CellTimes(phase="prefill", times={"a": 1600.0, "b": 100.0}),
    ]
    found = measured_ranks.rank_cells(key, entries)
    assert found.relative_times == {
        "a": pytest.approx(16**0.25), "b": pytest.approx(4**0.75, rel=1e-3),
    }  # fmt: skip
    assert found.order == ("a", "b"), "what failed somewhere has no rank"
    alone = measured_ranks.rank_cells(key, entries[2:])
    assert alone.relative_times == {"a": 16.0, "b": 1.0}
    assert math.isclose(sum(measured_ranks.PHASE_WEIGHTS.values()), 1.0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch-sizes", "0"], "--batch-sizes"),
        (["--device", "tpu"], "unknown device"),
    ],
)
def test_bad_flags(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", *flags]) == 1
    assert words in capsys.readouterr().err


def test_no_runs_are_refused_where_flags_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["kernels", "--runs", "0"])
    assert exit_.value.code == 2
    assert "argument --runs: expected a number of at least 1" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["kernels", "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for flag in ("MODEL", "--save", "--context-lens", "--prompt-lens", "--output-png", "--runs"):
        assert flag in text
