"""From what the checkpoint declares and the user asks to what every layer does.

Called once, by engine/arg_utils.py, after the config is read and max_model_len is known. The result
travels in EngineConfig to the workers (lifetimes, kernels) and to the core (groups).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.cache_spec import Full, Lifetime, Nothing, State, Window
from vllm.config.hybrid import HybridConfig, check_types, parse_hybrid_layers
from vllm.errors import ConfigError
from vllm.hybrid.layer_kinds import LayerKind, is_hybrid, kind_name, read_layer_kinds
from vllm.logger import init_logger

logger = init_logger(__name__)


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


def assign_layers(
    model_config: Mapping[str, Any], hybrid: HybridConfig, max_model_len: int
) -> tuple[LayerPolicy, ...] | None:
    """Return the policy of every layer, or None where the engine runs vanilla.

    Args:
        model_config: complete config of the checkpoint.
        hybrid: what the user asks for.
        max_model_len: most tokens of a sequence; ratios refer to it.

    Raises:
        ConfigError: the checkpoint and the request contradict each other, or vanilla mode is asked
            for a model that has states.
    """
    kinds = read_layer_kinds(model_config)
    num_layers = len(kinds)
    named = model_config.get("hybrid_attention_layers")
    if hybrid.enabled is False:
        _refuse_vanilla(kinds)
        return None
    wanted = hybrid.enabled or named or hybrid.block_size_map or hybrid.kv_cache_ratio
    if not wanted and not is_hybrid(kinds) and not hybrid.layer_impl_map:
        return None
    if named:
        hybrid = replace(hybrid, layers=parse_hybrid_layers(named, num_layers))
    names = _name_layers(kinds, hybrid)
    check_types(hybrid, sorted({*names, *hybrid.layers}), num_layers)
    policies = tuple(
        _assign_layer(kind, name, hybrid, max_model_len)
        for kind, name in zip(kinds, names, strict=True)
    )
    _warn_reduced(policies)
    return policies


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
    keeps_nothing = isinstance(kind.lifetime, Nothing)
    if (block_tokens == 0 or ratio == 0) and not keeps_nothing:
        raise ConfigError(
            f"layer {kind.layer} is of type {name!r}, which is given no cache, but it attends to "
            f"earlier tokens ({kind_name(kind.lifetime)}). Give its type a block size and a ratio "
            "above 0."
        )
    return LayerPolicy(
        layer=kind.layer,
        kind=name,
        lifetime=lifetime,
        block_tokens=None if keeps_nothing else block_tokens,
        kernel=hybrid.layer_impl_map.get(name, "auto"),
        reads_from=kind.reads_from,
        is_reduced=lifetime != kind.lifetime,
    )


def _limit(kind: LayerKind, ratio: float, sinks: int, max_model_len: int) -> Lifetime:
    """Apply a retention ratio; a window that the checkpoint declares stays as it is."""
    if not isinstance(kind.lifetime, Full) or ratio >= 1.0 or ratio <= 0.0:
        return kind.lifetime
    return Window(tokens=max(1, math.ceil(ratio * max_model_len)), sinks=sinks)


def _warn_reduced(policies: Sequence[LayerPolicy]) -> None:
    reduced = [p for p in policies if p.is_reduced]
    for lifetime in dict.fromkeys(p.lifetime for p in reduced):
        layers = [p.layer for p in reduced if p.lifetime == lifetime]
        assert isinstance(lifetime, Window), "only a full layer is ever reduced, to a window"
        logger.warning(
            "Layers %s were trained with full attention and keep the last %d tokens%s by "
            "kv_cache_ratio: results change beyond that length.",
            layers,
            lifetime.tokens,
            f" and the first {lifetime.sinks}" if lifetime.sinks else "",
        )
