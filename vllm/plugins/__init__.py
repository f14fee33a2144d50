"""Plug-ins: installed packages with an entry point in the group `vllm.general_plugins`.

Each entry point is a function that is called once in every process that makes an engine, for
instance to register a model. `VLLM_PLUGINS` (names, comma separated) limits which are loaded.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)

GROUP = "vllm.general_plugins"
_loaded: set[str] = set()


def load_general_plugins() -> None:
    """Call every allowed plug-in that this process has not called yet.

    One that fails is reported and left out; the engine starts without it.
    """
    allowed = envs.VLLM_PLUGINS
    names = None if allowed is None else {name.strip() for name in allowed.split(",")}
    for point in entry_points(group=GROUP):
        if point.name in _loaded or (names is not None and point.name not in names):
            continue
        _loaded.add(point.name)
        try:
            point.load()()
        except Exception:  # foreign code
            logger.exception("plug-in %s failed and is left out", point.name)
        else:
            logger.info("plug-in %s is loaded", point.name)


def set_torch_compile_backend(backend: object) -> None:
    """Refuse: this engine does not go through torch.compile."""
    raise NotImplementedError(
        f"torch.compile is not used, so the backend {backend!r} cannot be set"
    )
