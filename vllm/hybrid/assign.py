"""From what the checkpoint declares and the user asks to what every layer does.

Called by `resolve_hybrid`, once, after the config is read and max_model_len is known. Plain data
in, plain data out; the result travels in EngineConfig to the workers (lifetimes, kernels) and to
the core (groups).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.cache_spec import Full, Lifetime, Nothing, State, Window
from vllm.config.hybrid import (
    LAYERS_KEY,
    HybridConfig,
    LayerPolicy,
    check_types,
    parse_hybrid_layers,
)
from vllm.errors import ConfigError
from vllm.hybrid.layer_kinds import (
    LayerKind,
    is_hybrid,
    is_known_family,
    kind_name,
    read_layer_kinds,
)
from vllm.logger import init_logger, warn_once

logger = init_logger(__name__)


def assign_layers(
    model_config: Mapping[str, Any], hybrid: HybridConfig, max_model_len: int
) -> tuple[LayerPolicy, ...] | None:
    """Return the policy of every layer, or None where the engine runs vanilla.

    Args:
        model_config: complete config of the checkpoint.
        hybrid: what the user asks for; its `layers` win over those of the checkpoint.
        max_model_len: most tokens of a sequence; ratios refer to it.

    Raises:
        ConfigError: the checkpoint and the request contradict each other, or vanilla mode is asked
            for a model that has states.
    """
    named = hybrid.layers or model_config.get(LAYERS_KEY)
    is_asked = bool(hybrid.enabled or named or hybrid.asks_for_something)
    if not is_asked and not is_known_family(model_config):
        return None  # a model class of the user's own says in its specs what it keeps
    kinds = read_layer_kinds(model_config)
    if hybrid.enabled is False:
        _refuse_vanilla(kinds)
        return None
    if not is_asked and not is_hybrid(kinds):
        return None
    if named:
        hybrid = replace(hybrid, layers=parse_hybrid_layers(named, len(kinds)))
    names = _name_layers(kinds, hybrid)
    check_types(hybrid, sorted({*names, *hybrid.layers}), len(kinds))
    _warn_unread(kinds, names, hybrid)
    policies: list[LayerPolicy] = []
    for kind, name in zip(kinds, names, strict=True):
        policy = _assign_layer(kind, name, hybrid, max_model_len)
        if kind.reads_from is not None:  # nothing can be read that its owner has given up
            owner = policies[kind.reads_from]
            policy = replace(policy, lifetime=owner.lifetime, is_reduced=owner.is_reduced)
        policies.append(policy)
    _warn_reduced(policies)
    return tuple(policies)


def _refuse_vanilla(kinds: Sequence[LayerKind]) -> None:
    states = [k.layer for k in kinds if isinstance(k.lifetime, State)]
    if states:
        raise ConfigError(
            f"--hybrid-mode false asks for the vanilla engine, where every layer keeps every "
            f"token, but the layers {states} keep a state. Leave --hybrid-mode unset or set it to "
            "true."
        )


def _name_layers(kinds: Sequence[LayerKind], hybrid: HybridConfig) -> list[str]:
    if not hybrid.layers:
        return [kind.kind for kind in kinds]
    owner = {layer: name for name, ids in hybrid.layers.items() for layer in ids}
    return [owner[kind.layer] for kind in kinds]


def _assign_layer(
    kind: LayerKind, name: str, hybrid: HybridConfig, max_model_len: int
) -> LayerPolicy:
    ratio = hybrid.kv_cache_ratio.get(name, 1.0)
    block_tokens = hybrid.block_size_map.get(name)
    lifetime = _limit(kind, ratio, hybrid.kv_sink_tokens.get(name, 0), max_model_len)
    owns_cache = not isinstance(kind.lifetime, Nothing) and kind.reads_from is None
    if (block_tokens == 0 or ratio == 0) and owns_cache:
        what = "keeps a state" if isinstance(kind.lifetime, State) else "attends to earlier tokens"
        raise ConfigError(
            f"layer {kind.layer} is of type {name!r}, which is given no cache, but it {what} "
            f"({kind_name(kind.lifetime)}). Give its type a block size and a ratio above 0."
        )
    return LayerPolicy(
        layer=kind.layer,
        kind=name,
        lifetime=lifetime,
        block_tokens=block_tokens if owns_cache else None,
        kernel=hybrid.layer_impl_map.get(name, "auto"),
        reads_from=kind.reads_from,
        is_reduced=lifetime != kind.lifetime,
    )


def _limit(kind: LayerKind, ratio: float, sinks: int, max_model_len: int) -> Lifetime:
    """Apply a retention ratio; a window that the checkpoint declares stays as it is."""
    if not isinstance(kind.lifetime, Full) or ratio >= 1.0 or ratio <= 0.0:
        return kind.lifetime
    return Window(tokens=max(1, math.ceil(ratio * max_model_len)), sinks=sinks)


def _warn_unread(kinds: Sequence[LayerKind], names: Sequence[str], hybrid: HybridConfig) -> None:
    """Say where a ratio has no effect, because the checkpoint says itself what a layer keeps."""
    ignored: dict[tuple[str, Lifetime], list[int]] = {}
    for kind, name in zip(kinds, names, strict=True):
        is_own = not isinstance(kind.lifetime, Full | Nothing)
        if is_own and 0 < hybrid.kv_cache_ratio.get(name, 1.0) < 1:
            ignored.setdefault((name, kind.lifetime), []).append(kind.layer)
    for (name, lifetime), layers in ignored.items():
        warn_once(
            logger,
            f"kv_cache_ratio {hybrid.kv_cache_ratio[name]:g} of layer type {name!r} has no effect "
            f"on the layers {layers}: the checkpoint declares what they keep "
            f"({kind_name(lifetime)}).",
        )


def _warn_reduced(policies: Sequence[LayerPolicy]) -> None:
    reduced = [p for p in policies if p.is_reduced]
    for lifetime in dict.fromkeys(p.lifetime for p in reduced):
        layers = [p.layer for p in reduced if p.lifetime == lifetime]
        assert isinstance(lifetime, Window), "only a full layer is ever reduced, to a window"
        sinks = f" and the first {lifetime.sinks}" if lifetime.sinks else ""
        warn_once(
            logger,
            f"Layers {layers} were trained with full attention and keep the last "
            f"{lifetime.tokens} tokens{sinks} by kv_cache_ratio: results change beyond that "
            "length.",
        )
