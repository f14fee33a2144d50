"""Logging as the environment asks for it; each case in a process that imports the package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SAY = """
from vllm.logger import init_logger, warn_once
logger = init_logger("vllm.some.module")
logger.info("hello")
warn_once(logger, "beware")
warn_once(logger, "beware")
"""


def say(**variables: str) -> subprocess.CompletedProcess[str]:
    """Run SAY with some variables of the environment."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_LOGGING")}
    environment = {**kept, "PYTHONPATH": str(Path(__file__).parents[1]), **variables}
    return subprocess.run(
        [sys.executable, "-c", SAY], env=environment, capture_output=True, text=True, check=False
    )


def test_lines_begin_as_in_0_6_3() -> None:
    lines = say().stderr.splitlines()
    assert len(lines) == 2, "a warning is given once"
    for line, level, message in zip(lines, ("INFO", "WARNING"), ("hello", "beware"), strict=True):
        assert re.fullmatch(rf"{level} \d\d-\d\d \d\d:\d\d:\d\d <string>:\d\] {message}", line)


def test_levels() -> None:
    assert say(VLLM_LOGGING_LEVEL="warning").stderr.count("\n") == 1
    result = say(VLLM_LOGGING_LEVEL="loud")
    assert result.returncode == 1
    assert "VLLM_LOGGING_LEVEL is 'LOUD'; known are" in result.stderr.splitlines()[-1]


def test_file_of_the_user(tmp_path: Path) -> None:
    log = tmp_path / "own.log"
    file = tmp_path / "logging.json"
    handler = {"class": "logging.FileHandler", "filename": str(log), "formatter": "short"}
    config = {
        "version": 1,
        "formatters": {"short": {"format": "%(name)s says %(message)s"}},
        "handlers": {"file": handler},
        "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
    }
    file.write_text(json.dumps(config))
    result = say(VLLM_LOGGING_CONFIG_PATH=str(file))
    assert (result.returncode, result.stderr) == (0, "")
    assert log.read_text() == "vllm.some.module says hello\nvllm.some.module says beware\n"


def test_left_alone(tmp_path: Path) -> None:
    result = say(VLLM_CONFIGURE_LOGGING="0")
    assert (result.returncode, result.stderr) == (0, "beware\n"), "what Python does by itself"
    result = say(VLLM_CONFIGURE_LOGGING="0", VLLM_LOGGING_CONFIG_PATH=str(tmp_path / "x.json"))
    assert "RuntimeError" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"version": 1, "handlers": {"a": {}}}'])
def test_file_that_cannot_be_used(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "logging.json"
    if text is not None:
        file.write_text(text)
    result = say(VLLM_LOGGING_CONFIG_PATH=str(file))
    assert result.returncode == 1
    assert "ConfigError: VLLM_LOGGING_CONFIG_PATH" in result.stderr.splitlines()[-1]
