"""Environment variables: the only file that reads them, but for Triton's own.

Each is read at the moment of access, so that tests and launchers may set it late. Install paths,
debugging and deployment only; everything else is a flag.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from typing import Any

from vllm.errors import ConfigError


def _flag(name: str) -> Callable[[], bool]:
    return lambda: os.environ.get(name, "0").strip().lower() in ("1", "true", "yes", "on")


def _text(name: str, default: str | None = None) -> Callable[[], str | None]:
    return lambda: os.environ.get(name, default)


def _number(name: str, default: float) -> Callable[[], float]:
    def read() -> float:
        text = os.environ.get(name, "")
        try:
            value = float(text or default)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} must be a number, 0 or more, got {text!r}")
        return value

    return read


def _find_cache_root() -> str:
    own = os.environ.get("VLLM_CACHE_ROOT")
    if own:
        return own
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "vllm")


_VARIABLES: dict[str, Callable[[], Any]] = {
    # where things are kept
    "VLLM_CACHE_ROOT": _find_cache_root,
    "VLLM_RPC_BASE_PATH": lambda: os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir(),
    # server
    "VLLM_API_KEY": _text("VLLM_API_KEY"),
    "OPENAI_API_KEY": _text("OPENAI_API_KEY"),
    "VLLM_RPC_TIMEOUT": _number("VLLM_RPC_TIMEOUT", 10_000),  # ms
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": _number("VLLM_ENGINE_ITERATION_TIMEOUT_S", 600),
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": lambda: bool(
        os.environ.get("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH")
    ),
    # engine
    "VLLM_CPU_KVCACHE_SPACE": _number("VLLM_CPU_KVCACHE_SPACE", 0),  # GiB; 0 = chosen
    "VLLM_CPU_OMP_THREADS_BIND": _text("VLLM_CPU_OMP_THREADS_BIND", "all"),
    "VLLM_ATTENTION_BACKEND": _text("VLLM_ATTENTION_BACKEND"),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": _flag("VLLM_ALLOW_LONG_MAX_MODEL_LEN"),
    "VLLM_PLUGINS": _text("VLLM_PLUGINS"),
    # logging and debugging
    "VLLM_LOGGING_LEVEL": lambda: os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper(),
    "VLLM_CONFIGURE_LOGGING": lambda: os.environ.get("VLLM_CONFIGURE_LOGGING", "1") != "0",
    "VLLM_LOGGING_CONFIG_PATH": _text("VLLM_LOGGING_CONFIG_PATH"),  # JSON of logging.dictConfig
    "VLLM_POISON_CACHE": _flag("VLLM_POISON_CACHE"),  # fill freed cache bytes with NaN
}


def __getattr__(name: str) -> Any:
    try:
        return _VARIABLES[name]()
    except KeyError:
        raise AttributeError(f"unknown environment variable {name!r}") from None


def __dir__() -> list[str]:
    return sorted(_VARIABLES)


def make_child_environment(**defaults: str) -> dict[str, str]:
    """Return this process's environment for a child that computes; `defaults` fill what is not set.

    OpenMP threads wait passively: spinning after each parallel region would take the processors
    from the API process, and from the ranks of one machine. It can only be said before the start.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", **defaults, **os.environ}
