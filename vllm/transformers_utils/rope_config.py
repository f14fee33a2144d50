"""Rotary settings of a checkpoint in one documented form, whatever spelling the file uses.

Called by the config readers; models build their rotary tables from the result. The form is that of
transformers 5: `config["rope_parameters"]` is {"rope_type", "rope_theta", what the type needs} or,
for families whose layer types rotate differently, {layer type: such a dict}. The old keys
`rope_scaling`, `rope_theta`, `rope_local_base_freq` and `partial_rotary_factor` are folded into it
and removed. Never computes frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.errors import ConfigError
from vllm.logger import init_logger, warn_once

logger = init_logger(__name__)

LAYER_TYPES = ("full_attention", "sliding_attention")
_ALIASES = {"su": "longrope", "dynamic_ntk": "dynamic"}
# Keys that a type cannot do without; `original_max_position_embeddings` has a default (see below).
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
_NEEDS_ORIGINAL_LEN = ("yarn", "longrope", "llama3")
_LEN_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)


def normalize_rope(config: dict[str, Any], *, default_theta: float = 10_000.0) -> None:
    """Replace every spelling of rotary settings in `config` by one flat `rope_parameters` dict.

    Where the file itself nests the settings by layer type, the nesting is kept.

    Raises:
        ConfigError: a kind that is missing or not served, or a key that the kind needs.
    """
    scaling, given = config.pop("rope_scaling", None), config.pop("rope_parameters", None)
    theta = config.pop("rope_theta", None) or default_theta
    partial = config.pop("partial_rotary_factor", None)
    source = "rope_scaling" if scaling else "rope_parameters"
    settings = dict(scaling or given or {})
    nested = [key for key in LAYER_TYPES if isinstance(settings.get(key), Mapping)]
    if nested:
        config["rope_parameters"] = {
            key: _complete(dict(settings[key]), config, theta, partial, f"{source}.{key}")
            for key in nested
        }
    else:
        config["rope_parameters"] = _complete(settings, config, theta, partial, source)


def normalize_rope_by_layer_type(
    config: dict[str, Any], *, full_theta: float, sliding_theta: float
) -> None:
    """Same for a family whose window layers have a rotary base of their own, such as Gemma 3.

    Old spelling: `rope_theta` and `rope_scaling` are the full layers', `rope_local_base_freq` the
    window layers'.
    """
    scaling, given = config.pop("rope_scaling", None), config.pop("rope_parameters", None)
    thetas = {
        "full_attention": config.pop("rope_theta", None) or full_theta,
        "sliding_attention": config.pop("rope_local_base_freq", None) or sliding_theta,
    }
    partial = config.pop("partial_rotary_factor", None)
    settings = {key: dict((given or {}).get(key) or {}) for key in LAYER_TYPES}
    settings["full_attention"].update(scaling or {})
    config["rope_parameters"] = {
        key: _complete(settings[key], config, thetas[key], partial, f"rope_parameters.{key}")
        for key in LAYER_TYPES
    }


def _complete(
    settings: dict[str, Any], config: Mapping[str, Any], theta: float, partial: Any, source: str
) -> dict[str, Any]:
    """Check one group of settings and fill in its defaults."""
    kind = _kind(settings, source)
    result: dict[str, Any] = {"rope_type": kind, "rope_theta": float(theta)}
    if partial is not None:
        result["partial_rotary_factor"] = partial
    result |= {
        k: v for k, v in settings.items() if k not in ("type", "rope_type") and v is not None
    }
    result["rope_theta"] = float(result["rope_theta"])
    missing = [key for key in _REQUIRED[kind] if key not in result]
    if missing:
        raise ConfigError(
            f"{source} of the checkpoint's config has rope_type {kind!r} but lacks "
            f"{', '.join(repr(k) for k in missing)}: {settings}. Add it to config.json."
        )
    if kind in _NEEDS_ORIGINAL_LEN:
        trained_len = config.get("original_max_position_embeddings")
        if trained_len is None:
            trained_len = result.get("original_max_position_embeddings")
        if trained_len is None:
            trained_len = config.get("max_position_embeddings")
        result["original_max_position_embeddings"] = trained_len
    return result


def _kind(settings: Mapping[str, Any], source: str) -> str:
    new, old = settings.get("rope_type"), settings.get("type")
    if new and old and _ALIASES.get(new, new) != _ALIASES.get(old, old):
        warn_once(logger, f"{source} has rope_type {new!r} and type {old!r}; rope_type is used.")
    kind = new or old
    harmless = {"rope_theta", "partial_rotary_factor", "rope_type", "type"}
    if kind is None:
        if set(settings) - harmless:
            raise ConfigError(
                f"{source} of the checkpoint's config has no 'rope_type' (nor the older 'type'): "
                f"{dict(settings)}. Add one of {_allowed()}."
            )
        return "default"
    kind = _ALIASES.get(kind, kind)
    if kind not in _REQUIRED:
        raise ConfigError(f"rope_type {kind!r} in {source} is not served. Allowed: {_allowed()}.")
    return str(kind)


def _allowed() -> str:
    return ", ".join(repr(kind) for kind in _REQUIRED)


def context_len(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence that a (normalised) config promises; None if it names no length.

    The smallest of the length keys; a rotary scaling of type linear or dynamic multiplies it by its
    factor, yarn gives the original length times the factor. llama3 and longrope state the extended
    length in the keys themselves, and so do families with settings per layer type (Gemma 3).
    """
    lengths = [int(config[key]) for key in _LEN_KEYS if config.get(key)]
    if not lengths:
        return None
    length = min(lengths)
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "dynamic"):
        return int(length * rope["factor"])
    if kind == "yarn":
        return int(rope["original_max_position_embeddings"] * rope["factor"])
    return length
