"""Logging: one format, the `vllm` logger and its children, and warnings that are given once."""

from __future__ import annotations

import logging
import sys

from vllm import envs

_FORMAT = "%(levelname)s %(asctime)s %(name)s] %(message)s"
_said: set[tuple[str, str]] = set()


def configure_logging() -> None:
    """Give the `vllm` logger a handler on stderr, unless the user takes care of logging."""
    root = logging.getLogger("vllm")
    if root.handlers or not envs.VLLM_CONFIGURE_LOGGING:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, "%m-%d %H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(envs.VLLM_LOGGING_LEVEL)
    root.propagate = False


def init_logger(name: str) -> logging.Logger:
    """Return the logger of a module; the first call configures the package's logging."""
    configure_logging()
    return logging.getLogger(name)


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning the first time that this logger is given this message."""
    key = (logger.name, message)
    if key not in _said:
        _said.add(key)
        logger.warning(message)
