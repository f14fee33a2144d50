"""The command-line parser: names, switches, YAML files, hints."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from vllm.utils import Counter, FlexibleArgumentParser, StoreBoolean, random_uuid


def make_parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(prog="vllm")
    commands = parser.add_subparsers(dest="command")
    serve = commands.add_parser("serve")
    serve.add_argument("model_tag", nargs="?")
    serve.add_argument("--config", default="")
    serve.add_argument("--max-model-len", type=int)
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--served-model-name", nargs="+")
    serve.add_argument("--middleware", action="append", default=[])
    serve.add_argument("--rope-scaling", type=str)
    serve.add_argument("--enable-chunked-prefill", action=StoreBoolean, default=None)
    serve.add_argument("--enable-prefix-caching", action=StoreBoolean, default=True)
    serve.add_argument("--quiet", action="store_true")
    return parser


def parse(*args: str) -> argparse.Namespace:
    return make_parser().parse_args(["serve", *args])


@pytest.mark.parametrize(
    "args", [("--max_model_len", "9"), ("--max-model-len=9",), ("--max_model_len=9",)]
)
def test_underscores_are_dashes(args: tuple[str, ...]) -> None:
    assert parse("m", *args).max_model_len == 9


def test_value_keeps_its_underscores() -> None:
    assert parse("m", "--rope_scaling=a_b").rope_scaling == "a_b"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), None),
        (("--enable-chunked-prefill",), True),
        (("--enable-chunked-prefill", "false"), False),
        (("--enable_chunked_prefill=False",), False),
        (("--enable-chunked-prefill", "off"), False),
        (("--enable-chunked-prefill", "Yes"), True),
        (("--enable-chunked-prefill", "true", "--enable-chunked-prefill", "auto"), None),
        (("--enable-chunked-prefill=auto",), None),
        (("--no-enable-chunked-prefill",), False),
        (("--no-enable-chunked-prefill=false",), True),
    ],
)
def test_switches(args: tuple[str, ...], expected: bool | None) -> None:
    parsed = parse(*args, "model")
    assert parsed.enable_chunked_prefill is expected
    assert parsed.model_tag == "model", "a switch does not swallow what follows"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--enable-prefix-caching=maybe",), "expected true or false, got 'maybe'"),
        (("--enable-chunked-prefill=maybe",), "expected true, false or auto, got 'maybe'"),
        (
            ("m", "--enable-prefix-caching", "maybe"),
            "--enable-prefix-caching takes true or false, or stands alone; got 'maybe'",
        ),
        (
            ("m", "--enable_chunked_prefill", "maybe", "--port", "1"),
            "--enable-chunked-prefill takes true, false or auto, or stands alone; got 'maybe'",
        ),
        (("m", "--enable-prefix-caching", "auto"), "takes true or false, or stands alone"),
        (
            ("--enable-prefix-caching", "maybe", "m"),
            "unrecognized arguments: m (--enable-prefix-caching takes true or false; 'maybe'",
        ),
        (("m", "extra", "--quiet"), "unrecognized arguments: extra\n"),
    ],
)
def test_switch_refuses_nonsense(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(*args)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("--max-model-lenght", "--max-model-len"),
        ("--max_model_length", "--max-model-len"),
        ("--prot", "--port"),
        ("--prefix-caching", "--enable-prefix-caching"),
        ("--no-enable-prefix-cache", "--no-enable-prefix-caching"),
        ("--wrong-flag", None),
        ("--max-tokens", None),
        ("--temperature", None),
    ],
)
def test_unknown_flag_is_explained(
    flag: str, near: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parse("m", f"{flag}=9")
    assert raised.value.code == 2
    said = capsys.readouterr().err
    assert f"(did you mean {near}?)" in said if near else "did you mean" not in said


CONFIG = """
port: 7000
max_model_len: 64
served-model-name: [a, b]
middleware: [x.y, z]
rope_scaling: {type: yarn, factor: 2.0}
enable-prefix-caching: false
enable_chunked_prefill: true
quiet: true
"""


@pytest.mark.parametrize("form", ["two tokens", "one token"])
def test_config_file(tmp_path: Path, form: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    config = ["--config", str(path)] if form == "two tokens" else [f"--config={path}"]
    for args in ([*config, "M"], ["M", *config], ["M", "--port", "1", *config]):
        parsed = parse(*args)
        assert parsed.port == (1 if "--port" in args else 7000), "the command line wins"
        assert parsed.model_tag == "M"
        assert parsed.max_model_len == 64
        assert parsed.served_model_name == ["a", "b"]
        assert parsed.middleware == ["x.y", "z"]
        assert parsed.rope_scaling == '{"type": "yarn", "factor": 2.0}'
        assert parsed.enable_prefix_caching is False
        assert parsed.enable_chunked_prefill is True
        assert parsed.quiet is True


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.yaml", "prot: 1", "did you mean --port?"),
        ("c.yaml", "- a", "expected `flag: value` lines"),
        ("missing.yaml", None, "No such file"),
        ("c.yml", "port: x", "invalid int value"),
    ],
)
def test_config_file_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit):
        parse("M", "--config", str(path))
    assert message in capsys.readouterr().err


def test_config_file_must_be_yaml(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.yaml or \.yml"):
        parse("M", "--config", str(tmp_path / "c.json"))


def test_config_once_and_with_a_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args, message in (
        (["--config"], "needs the path"),
        (["--config", "a.yaml", "--config", "b"], "once"),
    ):
        with pytest.raises(SystemExit):
            parse("M", *args)
        assert message in capsys.readouterr().err


def test_help_shows_defaults_and_plain_switches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert "--enable-prefix-caching, --no-enable-prefix-caching\n" in text


def test_counter_and_uuid() -> None:
    counter = Counter(3)
    assert [next(counter), next(counter), counter.counter] == [3, 4, 5]
    counter.reset()
    assert next(counter) == 0
    assert len(random_uuid()) == 32
    assert random_uuid() != random_uuid()
