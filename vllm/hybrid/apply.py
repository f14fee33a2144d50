"""Gives the policies of hybrid mode to the layers of a loaded model.

Called by the worker, once, before kernels are chosen. Attention layers are told what their cache
keeps (and mask the rest); the specs of all other layers are only named, for what they keep is what
they compute with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from vllm.cache_spec import LayerCacheSpec, Lifetime
from vllm.config.hybrid import LayerPolicy
from vllm.errors import ConfigError
from vllm.hybrid.layer_kinds import kind_name


class LimitedLayer(Protocol):
    """What an attention layer must let itself be told."""

    def limit(self, lifetime: Lifetime, kind: str, layer_impl: str | None) -> None:
        """Keep and see only what `lifetime` says; compute with `layer_impl` if it is named."""
        ...


def limit_layers(
    layers: Mapping[int, LimitedLayer], policies: Sequence[LayerPolicy] | None
) -> None:
    """Tell each attention layer its policy; nothing to do in vanilla mode."""
    for policy in policies or ():
        layer = layers.get(policy.layer)
        if layer is not None:
            kernel = None if policy.kernel == "auto" else policy.kernel
            layer.limit(policy.lifetime, policy.kind, kernel)


def name_specs(
    specs: Sequence[LayerCacheSpec], policies: Sequence[LayerPolicy] | None
) -> tuple[LayerCacheSpec, ...]:
    """Return the specs under the names of their layer types.

    Raises:
        ConfigError: config and model disagree about what a layer keeps.
    """
    if policies is None:
        return tuple(specs)
    for spec in specs:
        policy = policies[spec.layer]
        if spec.lifetime != policy.lifetime or spec.reads_from != policy.reads_from:
            raise ConfigError(
                f"layer {spec.layer} (type {policy.kind!r}) keeps {kind_name(spec.lifetime)}, "
                f"which cannot be made {kind_name(policy.lifetime)}; give its type a "
                "kv_cache_ratio of 1.0 or leave it out"
            )
    return tuple(replace(spec, kind=policies[spec.layer].kind) for spec in specs)
