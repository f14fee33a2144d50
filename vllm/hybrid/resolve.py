"""From the four flags of hybrid mode to the settings that EngineConfig holds.

Called by engine/arg_utils.py, once an engine, and by `vllm hybrid`. Reads the file of
`--hybrid-config`; imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config.hybrid import LAYERS_KEY, HybridConfig, HybridSettings, load_hybrid_file
from vllm.hybrid.assign import assign_layers
from vllm.logger import init_logger, warn_once

logger = init_logger(__name__)


def resolve_hybrid(
    hf_config: Mapping[str, Any],
    max_model_len: int,
    *,
    mode: bool | None = None,
    file: str | None = None,
    is_strict: bool = False,
    trace_level: str = "off",
) -> HybridSettings:
    """Return what the flags mean for a checkpoint.

    Args:
        hf_config: complete config of the checkpoint.
        max_model_len: most tokens of a sequence.
        mode: `--hybrid-mode`; None is auto.
        file: path of `--hybrid-config`, or None.
        is_strict: `--hybrid-strict`.
        trace_level: `--trace-level`.

    Raises:
        ConfigError: the file, a value or a combination cannot be served.
    """
    content = dict(load_hybrid_file(file)) if file else {}
    if mode is False and file:
        warn_once(
            logger,
            f"--hybrid-mode false is the vanilla engine: --hybrid-config {file} has no effect.",
        )
        content = {}
    layers = content.pop(LAYERS_KEY, {})
    hybrid = HybridConfig(enabled=mode, layers=layers, **content)
    policies = assign_layers(hf_config, hybrid, max_model_len)
    named = (layers or hf_config.get(LAYERS_KEY) or {}) if policies else {}
    kinds = {policy.kind for policy in policies or ()}
    return HybridSettings(
        policies=policies,
        uncached_types=tuple(name for name in named if name not in kinds),
        is_vanilla=mode is False,
        is_strict=is_strict,
        trace_level=trace_level,
    )
