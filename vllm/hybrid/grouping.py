"""Several cache groups from the specs of the layers.

Called by engine/core.py in place of the base's single group, by the worker to size memory and by
`vllm hybrid`. Layers of one kind (the user's name) and one lifetime share a block table; a layer
that reads another's cache belongs to none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm.cache_spec import Full, KVCacheGroup, LayerCacheSpec, Lifetime, Nothing, make_group
from vllm.config.hybrid import HybridSettings
from vllm.core.block.geometry import MAX_SUPERBLOCK_BYTES, MIN_SUPERBLOCKS, plan_superblocks
from vllm.errors import ConfigError
from vllm.hybrid.layer_kinds import kind_name

_MAX_MORE_STRIPES = 8


def group_layers(
    specs: Sequence[LayerCacheSpec],
    settings: HybridSettings,
    default_block_tokens: int,
    kernel_block_tokens: Sequence[int] = (),
) -> tuple[KVCacheGroup, ...]:
    """Return one group for each (kind, lifetime), in the order of their first layers.

    Args:
        specs: what each decoder layer keeps; kinds and lifetimes already those of the policies.
        settings: for the block sizes that the user asks for.
        default_block_tokens: block size where the user names none.
        kernel_block_tokens: block sizes that the kernels take; empty asks for no check.

    Raises:
        ConfigError: a block size that no kernel takes, no cache at all, or vanilla mode with a
            layer that does not keep every token.
    """
    owners = [
        s for s in specs
        if s.fields and s.reads_from is None and not isinstance(s.lifetime, Nothing)
    ]  # fmt: skip
    if not owners:
        raise ConfigError("no layer of the model has a cache; there is nothing to schedule by")
    if settings.is_vanilla:
        _check_uniform(owners)
        owners = [replace(spec, kind=kind_name(spec.lifetime)) for spec in owners]
    members: dict[tuple[str, Lifetime], list[LayerCacheSpec]] = {}
    for spec in owners:
        members.setdefault((spec.kind, spec.lifetime), []).append(spec)
    sizes = settings.block_size_map(default_block_tokens)
    kinds = [kind for kind, _ in members]
    groups: list[KVCacheGroup] = []
    for (kind, lifetime), owned in members.items():
        tokens = sizes.get(kind, default_block_tokens)
        has_rows = any(field.per == "token" for spec in owned for field in spec.fields)
        if has_rows and kernel_block_tokens and tokens not in kernel_block_tokens:
            raise ConfigError(
                f"layer type {kind!r} (layers {[s.layer for s in owned]}) is given blocks of "
                f"{tokens} tokens; the kernels of its layers take "
                f"{', '.join(map(str, kernel_block_tokens))}."
            )
        is_alone = kinds.count(kind) == 1
        name = kind if is_alone else f"{kind}.{kind_name(lifetime)}"
        groups.append(make_group(name, owned, tokens))
    return _stripe(groups, owners)


def _check_uniform(owners: Sequence[LayerCacheSpec]) -> None:
    others = [s.layer for s in owners if not isinstance(s.lifetime, Full)]
    if others:
        raise ConfigError(
            f"--hybrid-mode false asks for the vanilla engine, where every layer keeps every "
            f"token, but the layers {others} do not. Leave --hybrid-mode unset or set it to true."
        )


def _stripe(
    groups: Sequence[KVCacheGroup], owners: Sequence[LayerCacheSpec]
) -> tuple[KVCacheGroup, ...]:
    """Cut states that are larger than a superblock may be into subsets of their layers.

    Of the numbers of stripes from the least possible on, the first is taken with which a superblock
    fits all groups; where none does, the one that wastes least.
    """
    if all(group.block_bytes <= MAX_SUPERBLOCK_BYTES for group in groups):
        return tuple(groups)
    best: tuple[KVCacheGroup, ...] = ()
    least_waste = float("inf")
    for more in range(_MAX_MORE_STRIPES):
        striped: list[KVCacheGroup] = []
        for group in groups:
            least = -(-group.block_bytes // MAX_SUPERBLOCK_BYTES)
            striped += _cut(group, owners, least + more if least > 1 else 1)
        sizes = [group.block_bytes for group in striped]
        geometry = plan_superblocks(sizes, MIN_SUPERBLOCKS * MAX_SUPERBLOCK_BYTES)
        if geometry.within_limits:
            return tuple(striped)
        if max(geometry.waste) < least_waste:
            best, least_waste = tuple(striped), max(geometry.waste)
    return best


def _cut(
    group: KVCacheGroup, owners: Sequence[LayerCacheSpec], num_stripes: int
) -> list[KVCacheGroup]:
    specs = [spec for spec in owners if spec.layer in group.layers]
    num_stripes = min(len(specs), num_stripes)
    if num_stripes == 1:
        return [group]
    bounds = [len(specs) * i // num_stripes for i in range(num_stripes + 1)]
    return [
        make_group(f"{group.name}.{i}", specs[bounds[i] : bounds[i + 1]], group.block_tokens)
        for i in range(num_stripes)
    ]
