"""Logging: one format, the `vllm` logger and its children, and warnings that are given once."""

from __future__ import annotations

import functools
import json
import logging
import logging.config
import sys

from vllm import envs
from vllm.errors import ConfigError

_FORMAT = "%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"
_said: set[tuple[str, str]] = set()


@functools.cache
def configure_logging() -> None:
    """Set logging up as the user's file says, or else on stderr, unless told to leave it alone.

    Raises:
        RuntimeError: there is a file, and logging is to be left alone.
        ConfigError: the file or the level cannot be used.
    """
    path = envs.VLLM_LOGGING_CONFIG_PATH
    if not envs.VLLM_CONFIGURE_LOGGING:
        if path:
            raise RuntimeError(
                f"VLLM_LOGGING_CONFIG_PATH names {path!r}, but VLLM_CONFIGURE_LOGGING is 0; "
                "unset one of them"
            )
        return
    if path:
        _configure_from(path)
        return
    root = logging.getLogger("vllm")
    if root.handlers:
        return
    level = envs.VLLM_LOGGING_LEVEL
    if level not in logging.getLevelNamesMapping():
        known = ", ".join(logging.getLevelNamesMapping())
        raise ConfigError(f"VLLM_LOGGING_LEVEL is {level!r}; known are {known}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, "%m-%d %H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False


def _configure_from(path: str) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            logging.config.dictConfig(json.load(file))
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as cause:
        raise ConfigError(
            f"VLLM_LOGGING_CONFIG_PATH={path!r} is no JSON file for logging.config.dictConfig: "
            f"{cause}"
        ) from cause


def init_logger(name: str) -> logging.Logger:
    """Return the logger of a module; the first call configures the package's logging."""
    configure_logging()
    return logging.getLogger(name)


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning the first time that this logger is given this message."""
    key = (logger.name, message)
    if key not in _said:
        _said.add(key)
        logger.warning(message, stacklevel=2)
