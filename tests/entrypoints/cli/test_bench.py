"""`vllm bench`: the loads, the numbers and the result files."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm.entrypoints.cli.bench import main
from vllm.entrypoints.cli.bench.dataset import (
    RandomShape,
    Sample,
    SonnetShape,
    sample_random,
    sample_sharegpt,
    sample_sonnets,
)
from vllm.entrypoints.cli.bench.load_client import RequestResult
from vllm.entrypoints.cli.bench.serve import pace_samples
from vllm.entrypoints.cli.bench.serve_args import make_parser as make_serve_parser
from vllm.entrypoints.cli.bench.serve_report import make_report
from vllm.entrypoints.cli.bench.summary import describe_times, find_percentiles
from vllm.errors import ConfigError


def test_percentiles() -> None:
    values = list(range(1, 102))
    assert find_percentiles(values, [0, 50, 99, 100]) == {0: 1.0, 50: 51.0, 99: 100.0, 100: 101.0}
    assert find_percentiles([], [99]) == {99: 0.0}
    times = describe_times("ttft", [0.001, 0.002, 0.006], (50.0, 99.9))
    assert times["mean_ttft_ms"] == pytest.approx(3.0)
    assert times["median_ttft_ms"] == pytest.approx(2.0)
    assert times["std_ttft_ms"] == pytest.approx(np.std([1, 2, 6]))
    assert times["p50_ttft_ms"] == pytest.approx(2.0)
    assert "p99.9_ttft_ms" in times


def test_report(chain_tokenizer: Any) -> None:
    results = [
        RequestResult(prompt_len=5, output_len=3, ttft=0.1, itl=[0.2, 0.2], latency=0.5),
        RequestResult(prompt_len=7, generated_text="ABCD", ttft=0.3, itl=[0.1], latency=0.6),
        RequestResult(prompt_len=9, error="broken", latency=99.0),
    ]
    times = ("ttft", "tpot", "itl", "e2el")
    report = make_report(results, 2.0, chain_tokenizer, times, (99.0,), {})
    assert "request_goodput" not in report
    assert report["completed"] == 2
    assert report["total_input_tokens"] == 12
    assert report["total_output_tokens"] == 7
    assert report["output_lens"] == [3, 4, 0]
    assert report["request_throughput"] == 1.0
    assert report["output_throughput"] == 3.5
    assert report["total_token_throughput"] == 9.5
    assert report["mean_ttft_ms"] == pytest.approx(200)
    assert report["mean_tpot_ms"] == pytest.approx((200 + 100) / 2)
    assert report["median_itl_ms"] == pytest.approx(200)
    assert report["mean_e2el_ms"] == report["median_e2el_ms"] == pytest.approx(550)
    assert report["errors"] == ["", "", "broken"]


@pytest.mark.parametrize(
    ("goals", "num_within"),
    [
        ({"ttft": 300}, 2),
        ({"ttft": 299}, 1),
        ({"tpot": 100}, 1),
        ({"ttft": 100, "tpot": 100}, 0),
        ({"e2el": 500, "tpot": 200}, 1),
    ],
)
def test_goodput(chain_tokenizer: Any, goals: dict[str, float], num_within: int) -> None:
    results = [
        RequestResult(prompt_len=5, output_len=3, ttft=0.1, itl=[0.2, 0.2], latency=0.5),
        RequestResult(prompt_len=7, output_len=4, ttft=0.3, itl=[0.1], latency=0.6),
        RequestResult(prompt_len=9, error="broken"),
    ]
    report = make_report(results, 2.0, chain_tokenizer, (), (), goals)
    assert report["request_goodput"] == num_within / 2.0


@pytest.mark.parametrize("goal", ["itl:5", "ttft", "ttft:", "ttft:-1", "ttft:nan"])
def test_goals_that_are_none(goal: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--model", "m", "--goodput", goal])
    assert "expected METRIC:MILLISECONDS" in capsys.readouterr().err


def test_random_prompts(chain_tokenizer: Any) -> None:
    shape = RandomShape(input_len=20, output_len=10, range_ratio=0.5, prefix_len=4)
    samples = sample_random(chain_tokenizer, 30, shape, seed=1)
    assert samples == sample_random(chain_tokenizer, 30, shape, seed=1)
    assert all(5 <= s.output_len <= 10 for s in samples)
    assert all(8 <= s.prompt_len <= 24 for s in samples)
    for sample in samples:
        ids = chain_tokenizer.encode(sample.prompt, add_special_tokens=False)
        assert len(ids) == sample.prompt_len


def write_sharegpt(path: Path, num: int = 6) -> Path:
    """Write a ShareGPT file of usable conversations and two that are not."""
    talks = [[{"value": f"question {i} of many"}, {"value": f"answer {i}"}] for i in range(num)]
    talks += [[{"value": "only one turn here"}], [{"value": "a"}, {"value": "too short a prompt"}]]
    path.write_text(json.dumps([{"conversations": talk} for talk in talks]))
    return path


def test_sharegpt_files(chain_tokenizer: Any, tmp_path: Path) -> None:
    path = str(write_sharegpt(tmp_path / "talks.json"))
    samples = sample_sharegpt(chain_tokenizer, path, 6)
    assert sorted(s.prompt for s in samples)[0] == "question 0 of many"
    assert {s.output_len for s in samples} == {len("answer 0")}
    assert {s.output_len for s in sample_sharegpt(chain_tokenizer, path, 2, output_len=3)} == {3}
    with pytest.raises(ConfigError, match="holds 6 usable"):
        sample_sharegpt(chain_tokenizer, path, 7)
    (tmp_path / "bad.json").write_text('{"a": 1}')
    for bad in ("bad.json", "missing.json"):
        with pytest.raises(ConfigError, match="not a ShareGPT file"):
            sample_sharegpt(chain_tokenizer, str(tmp_path / bad), 1)


def test_sonnets(chain_tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_text("".join(f"this is line number {i:03}\n" for i in range(50)))
    shape = SonnetShape(input_len=200, output_len=9, prefix_len=60)
    samples = sample_sonnets(chain_tokenizer, str(path), 5, shape)
    assert all(abs(s.prompt_len - 200) < 30 for s in samples)
    shared = samples[0].prompt[:110]
    assert all(s.prompt.startswith(shared) for s in samples)
    assert len({s.prompt for s in samples}) == 5


async def test_poisson_arrivals() -> None:
    samples = [Sample(prompt="", prompt_len=1, output_len=1)] * 200
    start_s = time.perf_counter()
    count = 0
    async for _ in pace_samples(samples, 400.0, seed=0):
        count += 1
    elapsed_s = time.perf_counter() - start_s
    assert count == 200
    wanted = np.random.default_rng(0).exponential(1 / 400, 200)[1:].sum()
    assert elapsed_s == pytest.approx(wanted, abs=0.25)
    start_s = time.perf_counter()
    assert len([s async for s in pace_samples(samples, float("inf"), seed=0)]) == 200
    assert time.perf_counter() - start_s < 0.1


@pytest.mark.parametrize("backend", ["vllm", "openai-chat"])
def test_serve(
    serve: Any,
    chain_model: Path,
    tmp_path: Path,
    backend: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = serve("hello DEF", delay_s=0.002)
    arguments = [
        "serve", "--backend", backend, "--base-url", client.url, "--model", str(chain_model),
        "--served-model-name", "chain", "--dataset-name", "random", "--random-input-len", "6",
        "--random-output-len", "4", "--num-prompts", "8", "--request-rate", "200",
        "--max-concurrency", "4", "--save-result", "--result-dir", str(tmp_path),
        "--result-filename", "r.json", "--percentile-metrics", "ttft,tpot,itl,e2el",
        "--metric-percentiles", "50,99",
        "--metadata", "who=me", "--disable-tqdm", "--ignore-eos", "--goodput", "ttft:60000",
    ]  # fmt: skip
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "Successful requests:" in text
    assert "P99 E2EL (ms):" in text
    result = json.loads((tmp_path / "r.json").read_text())
    fields = """date backend model_id tokenizer_id best_of num_prompts who request_rate duration
        completed total_input_tokens total_output_tokens request_throughput output_throughput
        total_token_throughput input_lens output_lens ttfts itls generated_texts errors"""
    assert set(fields.split()) <= set(result)
    assert {f"{k}_{m}_ms" for k in ("mean", "median", "std", "p50", "p99")
            for m in ("ttft", "tpot", "itl", "e2el")} <= set(result)  # fmt: skip
    assert result["completed"] == 8
    assert result["request_goodput"] == result["request_throughput"]
    assert result["output_lens"] == [4] * 8
    assert result["generated_texts"] == ["hello DEF"] * 8
    assert result["median_e2el_ms"] >= result["median_ttft_ms"] > 0
    assert all(params.ignore_eos for _, params in client.engine.requests)
    assert len(client.engine.requests) == 9, "one test request, then the load"


def test_serve_without_a_server(chain_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["serve", "--port", "9", "--model", str(chain_model), "--dataset-name", "random"]
    assert main([*arguments, "--random-input-len", "5", "--num-prompts", "1"]) == 1
    assert "the test request" in capsys.readouterr().err
    assert main(["serve", "--model", str(chain_model)]) == 1
    assert "--dataset-path" in capsys.readouterr().err


ENGINE = [
    "--dtype", "float32", "--num-gpu-blocks-override", "64", "--max-num-seqs", "8",
    "--max-model-len", "512",
]  # fmt: skip


def test_latency(chain_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    arguments = [
        "latency", "--model", str(chain_model), "--input-len", "4", "--output-len", "3",
        "--batch-size", "2", "--num-iters-warmup", "1", "--num-iters", "3",
        "--output-json", str(path),
    ]  # fmt: skip
    assert main([*arguments, *ENGINE]) == 0
    result = json.loads(path.read_text())
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(np.mean(result["latencies"]))
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == pytest.approx(np.median(result["latencies"]))


@pytest.mark.parametrize("flags", [[], ["--async-engine", "--disable-frontend-multiprocessing"]])
def test_throughput(chain_model: Path, tmp_path: Path, flags: list[str]) -> None:
    path = tmp_path / "throughput.json"
    arguments = ["throughput", "--model", str(chain_model), "--output-json", str(path), *flags]
    load = ["--input-len", "5", "--output-len", "4", "--num-prompts", "6", "--n", "2"]
    assert main([*arguments, *load, *ENGINE]) == 0
    result = json.loads(path.read_text())
    assert set(result) == {
        "elapsed_time", "num_requests", "total_num_tokens", "requests_per_second",
        "tokens_per_second",
    }  # fmt: skip
    assert result["num_requests"] == 6
    assert result["total_num_tokens"] == 6 * (5 + 2 * 4)
    assert result["requests_per_second"] == pytest.approx(6 / result["elapsed_time"])


def test_throughput_of_a_data_set(chain_model: Path, tmp_path: Path) -> None:
    path = write_sharegpt(tmp_path / "talks.json")
    arguments = ["throughput", "--model", str(chain_model), "--dataset", str(path)]
    assert main([*arguments, "--num-prompts", "3", "--output-len", "4", *ENGINE]) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--backend", "hf"], "other engines"),
        ([], "--input-len"),
        (["--dataset", "x", "--input-len", "3"], "cannot be combined"),
    ],
)
def test_bad_flags(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["throughput", "--model", "x", *flags]) == 1
    assert words in capsys.readouterr().err
    assert main(["thruput"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--num-prompts", "0"],
        ["serve", "--request-rate", "0"],
        ["serve", "--request-rate", "nan"],
        ["serve", "--max-concurrency", "0"],
        ["latency", "--num-iters", "0"],
        ["latency", "--batch-size", "-1"],
        ["throughput", "--num-prompts", "0"],
    ],
    ids=" ".join,
)
def test_loads_of_nothing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*arguments, "--model", "x"])
    assert f"argument {arguments[1]}: expected a number" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["lmdeploy", "scalellm", "sglang"])
def test_servers_that_speak_openai(backend: str) -> None:
    args = make_serve_parser().parse_args(["--model", "x", "--backend", backend])
    assert args.backend == backend


def test_results_do_not_depend_on_the_event_loop() -> None:
    assert asyncio.run(_first_gap()) < 0.05


async def _first_gap() -> float:
    start_s = time.perf_counter()
    async for _ in pace_samples([Sample(prompt="", prompt_len=1, output_len=1)], 0.1, seed=3):
        return time.perf_counter() - start_s
    return 1.0
