"""The user's hybrid configuration: parse, validate, save; and what follows from it for each layer.

Two sources meet here: `hybrid_attention_layers` of the checkpoint's config.json (layer type ->
layer ids) and the file of `--hybrid-config` (block sizes, kernels and retention by layer type).
Plain dataclasses, so that every floor may hold them; `vllm/hybrid/assign.py` makes policies of the
one and the other.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.cache_spec import Lifetime, Nothing, State
from vllm.errors import ConfigError

KERNELS = ("auto", "cpu", "flashattn", "flashattn3", "torch", "triton", "xformers")
TRACE_LEVELS = ("off", "info", "debug")
LAYERS_KEY = "hybrid_attention_layers"
MAX_BLOCK_TOKENS = 1024
_MAPS = ("block_size_map", "layer_impl_map", "kv_cache_ratio", "kv_sink_tokens")
_KEYS = (LAYERS_KEY, *_MAPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """What the user asks of each layer type; empty maps ask for nothing.

    Attributes:
        enabled: True, False (vanilla), or None: on when the checkpoint declares layers that
            remember less than everything.
        layers: layer type -> ids of its layers; empty where the checkpoint's own types are used.
            An id from the number of layers on names a module after the decoder.
        block_size_map: layer type -> tokens of a block; 0 for a type without cache.
        layer_impl_map: layer type -> kernel, one of KERNELS.
        kv_cache_ratio: layer type -> share of max_model_len that a sequence keeps, 0 to 1.
        kv_sink_tokens: layer type -> first tokens kept beside that.
    """

    enabled: bool | None = None
    layers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    block_size_map: Mapping[str, int] = field(default_factory=dict)
    layer_impl_map: Mapping[str, str] = field(default_factory=dict)
    kv_cache_ratio: Mapping[str, float] = field(default_factory=dict)
    kv_sink_tokens: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_blocks(self.block_size_map)
        _check_kernels(self.layer_impl_map)
        _check_ratios(self.kv_cache_ratio)
        _check_sinks(self.kv_sink_tokens)

    @property
    def asks_for_something(self) -> bool:
        """Whether the user asks for anything beyond what the checkpoint declares."""
        return bool(self.layers or any(getattr(self, name) for name in _MAPS))

    def save(self, path: str | Path) -> None:
        """Write the maps as the JSON file that `--hybrid-config` reads."""
        content = {name: dict(getattr(self, name)) for name in _MAPS if getattr(self, name)}
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPolicy:
    """What one decoder layer keeps and how it computes.

    Attributes:
        kind: name of its layer type; layers of one kind and lifetime share a group.
        lifetime: what its cache keeps.
        block_tokens: tokens of a block that the user asks for, or None.
        kernel: kernel that the user asks for, or "auto".
        reads_from: layer whose cache it reads.
        is_reduced: whether it keeps less than the checkpoint was trained with.
    """

    layer: int
    kind: str
    lifetime: Lifetime
    block_tokens: int | None = None
    kernel: str = "auto"
    reads_from: int | None = None
    is_reduced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridSettings:
    """Hybrid mode, resolved: what EngineConfig holds.

    Attributes:
        policies: one for each decoder layer, or None: every layer's own spec decides, as in the
            base engine.
        is_vanilla: the user asks for one uniform cache; a model that cannot have it is refused.
        is_strict: an unavailable kernel is an error instead of a warning.
        trace_level: one of TRACE_LEVELS; "debug" logs every allocation.
        uncached_types: layer types of modules after the decoder, which keep nothing.
    """

    policies: tuple[LayerPolicy, ...] | None = None
    is_vanilla: bool = False
    is_strict: bool = False
    trace_level: str = "off"
    uncached_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.trace_level not in TRACE_LEVELS:
            raise ConfigError(
                f"--trace-level is {self.trace_level!r}; allowed: {', '.join(TRACE_LEVELS)}."
            )

    def block_size_map(self, default_block_tokens: int) -> dict[str, int]:
        """Return layer type -> tokens of a block, for the types that keep rows of tokens."""
        return {
            policy.kind: policy.block_tokens or default_block_tokens
            for policy in self.policies or ()
            if policy.reads_from is None and not isinstance(policy.lifetime, State | Nothing)
        }

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The block sizes that the user names, sorted."""
        return tuple(sorted({p.block_tokens for p in self.policies or () if p.block_tokens}))


def load_hybrid_file(path: str | Path) -> dict[str, dict[str, Any]]:
    """Read a `--hybrid-config` file: the maps, and `hybrid_attention_layers` where it has them.

    Raises:
        ConfigError: not readable, not a JSON object, or a key that does not exist.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--hybrid-config {path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"--hybrid-config {path} holds a {type(content).__name__}; expected an object."
        )
    for key, value in content.items():
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"--hybrid-config {path} has the key {key!r}; allowed: {', '.join(_KEYS)}.{hint}"
            )
        if not isinstance(value, dict):
            raise ConfigError(
                f"--hybrid-config {path}: {key!r} must map layer types to values, not {value!r}."
            )
    return content


def parse_hybrid_layers(value: Any, num_layers: int) -> dict[str, tuple[int, ...]]:
    """Validate `hybrid_attention_layers`.

    Args:
        value: layer type -> list of layer ids.
        num_layers: decoder layers of the checkpoint.

    Raises:
        ConfigError: an id is missing, listed twice or no whole number; the message names the ids.
    """
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(
            f"`hybrid_attention_layers` is {value!r}; it must map layer types to lists of layer "
            "ids."
        )
    owner: dict[int, str] = {}
    for name, ids in value.items():
        if not isinstance(ids, Sequence) or isinstance(ids, str):
            raise ConfigError(
                f"`hybrid_attention_layers` gives {name!r} the value {ids!r}; a list of layer "
                "ids is needed."
            )
        for layer in ids:
            if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
                raise ConfigError(
                    f"`hybrid_attention_layers` lists {layer!r} under {name!r}; ids are whole "
                    "numbers from 0."
                )
            if layer in owner:
                raise ConfigError(
                    f"`hybrid_attention_layers` lists layer {layer} under {owner[layer]!r} and "
                    f"{name!r}; every layer belongs to exactly one type."
                )
            owner[layer] = str(name)
    missing = [i for i in range(num_layers) if i not in owner]
    if missing:
        raise ConfigError(
            f"`hybrid_attention_layers` does not list the layers {missing}; each of the "
            f"{num_layers} decoder layers must appear exactly once."
        )
    return {str(name): tuple(ids) for name, ids in value.items()}


def check_types(config: HybridConfig, known: Sequence[str], num_layers: int) -> None:
    """Check that the maps speak of known layer types, and give modules after the decoder no cache.

    Raises:
        ConfigError: an unknown type, or a module after the decoder with a cache.
    """
    for name in _MAPS:
        for kind in getattr(config, name):
            if kind not in known:
                close = difflib.get_close_matches(kind, known, 1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ConfigError(
                    f"`{name}` of the hybrid config speaks of layer type {kind!r}, which this "
                    f"model does not have; its types are {', '.join(map(repr, known))}.{hint}"
                )
    for kind, ids in config.layers.items():
        after = [i for i in ids if i >= num_layers]
        if after and config.block_size_map.get(kind, 0) != 0:
            raise ConfigError(
                f"layer type {kind!r} lists {after}, modules after the {num_layers} decoder "
                f"layers; they keep no cache, so its block size must be 0, not "
                f"{config.block_size_map[kind]}."
            )
        if after and config.kv_cache_ratio.get(kind, 0) != 0:
            raise ConfigError(
                f"layer type {kind!r} lists {after}, modules after the {num_layers} decoder "
                f"layers; they keep no cache, so its kv_cache_ratio must be 0, not "
                f"{config.kv_cache_ratio[kind]}."
            )
        if after and len(after) != len(ids):
            raise ConfigError(
                f"layer type {kind!r} mixes decoder layers with modules after the decoder "
                f"({after}); give the latter a type of their own."
            )


def _check_blocks(sizes: Mapping[str, int]) -> None:
    for kind, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_BLOCK_TOKENS:
            raise ConfigError(
                f"`block_size_map` gives {kind!r} the block size {size!r}; allowed: 0 (no cache) "
                f"or the tokens of a block, up to {MAX_BLOCK_TOKENS}."
            )


def _check_kernels(kernels: Mapping[str, str]) -> None:
    for kind, kernel in kernels.items():
        if kernel not in KERNELS:
            close = difflib.get_close_matches(str(kernel), KERNELS, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"`layer_impl_map` gives {kind!r} the kernel {kernel!r}; allowed: "
                f"{', '.join(KERNELS)}.{hint}"
            )


def _check_ratios(ratios: Mapping[str, float]) -> None:
    for kind, ratio in ratios.items():
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            raise ConfigError(
                f"`kv_cache_ratio` gives {kind!r} the ratio {ratio!r}; allowed: 0 (no cache) to 1 "
                "(everything)."
            )


def _check_sinks(sinks: Mapping[str, int]) -> None:
    for kind, tokens in sinks.items():
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
            raise ConfigError(
                f"`kv_sink_tokens` gives {kind!r} the value {tokens!r}; a number of tokens is "
                "needed."
            )
