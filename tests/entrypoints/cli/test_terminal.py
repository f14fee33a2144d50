"""`vllm complete`, `vllm chat` and `vllm stats` against a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from vllm.entrypoints.cli.stats import format_stats
from vllm.scripts import main


@pytest.fixture(autouse=True)
def _keep_signals() -> Iterator[None]:
    """The commands take SIGINT and SIGTSTP."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTSTP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Let `input` give these lines, then the end of the file."""
    pending = iter(lines)

    def read(_prompt: str) -> str:
        line = next(pending, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)


def test_complete(
    hello: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "one", "", "two")
    assert main(["complete", "--url", f"{hello.url}/v1", "--max-tokens", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Using model: chain"
    assert lines.count("hello") == 2
    assert [p["prompt"] for p, _ in hello.engine.requests[-2:]] == ["one", "two"]
    assert hello.engine.requests[-1][1].max_tokens == 9


def test_chat_keeps_the_conversation(
    hello: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "first", "second")
    arguments = ["--system-prompt", "be kind", "--model-name", "chain-alias", "--temperature", "0"]
    assert main(["chat", "--url", f"{hello.url}/v1", *arguments]) == 0
    assert capsys.readouterr().out.splitlines().count("hello") == 2
    prompt, params = hello.engine.requests[-1]
    assert prompt["prompt"] == (
        "system: be kind\nuser: first\nassistant: hello\nuser: second\nassistant: "
    )
    assert params.temperature == 0


def test_key_comes_from_flag_or_environment(
    serve: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = serve(flags={"api_key": "secret"})
    type_lines(monkeypatch)
    url = f"{client.url}/v1"
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    assert main(["complete", "--url", url]) == 1
    assert "Unauthorized" in capsys.readouterr().err
    assert main(["complete", "--url", url, "--api-key", "secret"]) == 0
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert main(["chat", "--url", url]) == 0


def test_errors_of_the_server_are_one_line(
    serve: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = serve("hello hello", fails_after=2)
    type_lines(monkeypatch, "a")
    assert main(["complete", "--url", f"{client.url}/v1"]) == 1
    assert "killed by the test" in capsys.readouterr().err
    assert main(["complete", "--url", "http://127.0.0.1:9/v1"]) == 1
    assert "no server answers" in capsys.readouterr().err
    assert main(["complete", "--url", "ftp://x"]) == 1


def test_interrupt_ends_quietly(hello: Any) -> None:
    command = [sys.executable, "-m", "vllm.scripts", "chat", "--url", f"{hello.url}/v1"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"Using model: chain\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (0, b"")


def test_stats(hello: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--url", f"{hello.url}/v1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_running_requests"] == 0
    assert main(["stats", "--url", hello.url]) == 0
    assert "num_running_requests" in capsys.readouterr().out


def test_table_of_stats() -> None:
    lines = list(
        format_stats(
            {
                "num_running_requests": 3,
                "gpu_cache_usage": 0.123456,
                "blocks_by_group": {"full": {"total": 10, "free": 7}},
                "kernels": {
                    "0": {"kernel": "cpu", "note": ""},
                    "1": {"kernel": "cpu", "note": ""},
                    "10": {"kernel": "torch", "note": "cpu: head size"},
                    "2": {"kernel": "cpu", "note": ""},
                },
                "cache_groups": {"full": {"layers": [0, 1, 2, 5], "waste": 0.25}},
                "startup": {"cache_bytes": 5, "nested": {"a": {"b": 1}}},
            }
        )
    )
    text = "\n".join(lines)
    assert "0.1235" in text
    assert any(line.split() == ["group", "total", "free"] for line in lines)
    assert any(line.split() == ["full", "10", "7"] for line in lines)
    assert any(line.split() == ["0-2", "cpu"] for line in lines)
    assert any(line.startswith("10 ") and "(cpu: head size)" in line for line in lines)
    assert any(line.split() == ["cache_bytes", "5"] for line in lines)
    assert any(line.split() == ["full", "0-2,5", "0.25"] for line in lines)
    assert any(line.split() == ["a", "1"] for line in lines)
