"""The flags of `vllm serve`: what cannot be served is said in one line, before any loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm.entrypoints.cli.serve import choose_model, make_parser
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.errors import ConfigError
from vllm.scripts import main


def parse(*flags: str) -> Any:
    """Parse flags of `vllm serve`."""
    return make_parser("vllm serve").parse_args(["model", *flags])


def server_args(*flags: str) -> ServerArgs:
    """Parse flags into ServerArgs."""
    return ServerArgs.from_namespace(parse(*flags))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-model-lenn", "5"], "did you mean --max-model-len"),
        (["--enable-auto-tool-choice"], "--tool-call-parser"),
        (["--chat-template", "/no/such/file"], "no such file"),
        (["--ssl-keyfile", "key.pem"], "--ssl-certfile"),
        (["--host", "256.0.0.1"], "256.0.0.1"),
        (["--port", "99999"], "65535"),
        (["--allowed-origins", "*"], "JSON list"),
        (["--lora-modules", "a=b"], "adapters are not served"),
        (["--model", "another"], "two models"),
        (["--config", "x.txt"], ".yaml"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--uvicorn-log-level", "loud"], "loud"),
        (["--shutdown-timeout", "-1"], "0 or more"),
        (["--shutdown-timeout", "nan"], "0 or more"),
        (["--max-log-len", "-1"], "0 or more"),
        (["--ssl-cert-reqs", "7"], "7"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_cannot_be_served(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["serve", "model", *flags])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status != 0
    text = capsys.readouterr().err.strip()
    assert words in text
    assert len(text.splitlines()) <= 2


def test_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 1
    assert "no model is given" in capsys.readouterr().err


def test_model_as_positional_and_as_flag() -> None:
    parser = make_parser("vllm serve")
    assert choose_model(parser.parse_args(["--model", "a"])) == "a"
    assert choose_model(parser.parse_args(["a", "--model", "a"])) == "a"
    assert choose_model(parser.parse_args(["a"])) == "a"
    assert choose_model(parser.parse_args(["--port", "1", "a"])) == "a"


def test_command_of_the_mission() -> None:
    args = parse(
        "--tensor-parallel-size", "4", "--pipeline-parallel-size", "1", "--max-model-len", "8192",
        "--gpu-memory-utilization", "0.9", "--enable-prefix-caching", "--disable-async-output-proc",
        "--port", "8000", "--host", "0.0.0.0", "--trust-remote-code",
    )  # fmt: skip
    assert (args.tensor_parallel_size, args.max_model_len, args.port) == (4, 8192, 8000)
    assert args.enable_prefix_caching
    assert args.host == "0.0.0.0"


def test_underscores_switches_and_nulls() -> None:
    args = parse("--max_model_len=5", "--api_key", "None", "--enable_auto_tool_choice", "false")
    assert (args.max_model_len, args.api_key, args.enable_auto_tool_choice) == (5, None, False)
    assert parse("--middleware", "a.b", "--middleware", "c.d").middleware == ["a.b", "c.d"]
    assert parse("--allowed-origins", '["x"]').allowed_origins == ["x"]


def test_key_of_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert server_args("--api-key", "flag").api_key == "flag"
    monkeypatch.setenv("VLLM_API_KEY", "environment")
    assert server_args("--api-key", "flag").api_key == "environment"


def test_chat_template_from_file_or_text(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}\n")
    assert server_args("--chat-template", str(file)).chat_template == "{{ messages }}\n"
    assert server_args("--chat-template", r"{{ a }}\n").chat_template == "{{ a }}\n"
    assert server_args("--chat-template", "ä{{ a }}").chat_template == "ä{{ a }}"
    assert server_args("--chat-template", r"ä中{{ a }}\n\u00e4").chat_template == "ä中{{ a }}\nä"


@pytest.mark.parametrize("template", [r"{{ '\x' }}", "{{ a }}\\"])
def test_chat_template_that_is_no_text(template: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="backslash"):
        server_args("--chat-template", template)
    file = tmp_path / "t.jinja"
    file.write_bytes(b"\xff{{ a }}")
    with pytest.raises(ConfigError, match="UTF-8"):
        server_args("--chat-template", str(file))


def test_help_is_grouped_and_names_every_core_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for title in ("HTTP server:", "CORS:", "chat and tools:", "KV cache and memory:"):
        assert title in text
    core = """config host port uvicorn-log-level allow-credentials allowed-origins allowed-methods
        allowed-headers api-key chat-template response-role ssl-keyfile ssl-certfile
        ssl-ca-certs ssl-cert-reqs root-path middleware return-tokens-as-token-ids
        disable-frontend-multiprocessing enable-auto-tool-choice tool-call-parser
        tool-parser-plugin max-log-len disable-fastapi-docs disable-log-requests model
        served-model-name tokenizer skip-tokenizer-init revision tokenizer-revision
        tokenizer-mode trust-remote-code download-dir load-format config-format dtype
        kv-cache-dtype max-model-len rope-scaling rope-theta ignore-patterns seed max-logprobs
        guided-decoding-backend device tensor-parallel-size distributed-executor-backend
        disable-custom-all-reduce block-size gpu-memory-utilization swap-space
        num-gpu-blocks-override enable-prefix-caching disable-sliding-window max-num-seqs
        max-num-batched-tokens enable-chunked-prefill scheduling-policy preemption-mode
        enforce-eager max-seq-len-to-capture disable-log-stats"""
    for name in core.split():
        assert f"--{name}" in text, name


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("serve", "complete", "chat", "bench", "stats", "collect-env"):
        assert name in text
    assert main([]) == 2
    assert main(["sevre"]) == 2
    assert "did you mean `vllm serve`?" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("0.6.3+hybrid")
