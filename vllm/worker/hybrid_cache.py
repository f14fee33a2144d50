"""The cache by layer type: blocks of several sizes out of one arena.

Behind `CacheEngine.allocate_hybrid` and the worker's choice of a cache size. Pure functions of
groups, specs and sizes; the arena and its views stay with the cache engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from vllm.batch import LayerCache
from vllm.cache_spec import KVCacheGroup, LayerCacheSpec, Nothing, State, make_group
from vllm.core.block.table import make_block_managers
from vllm.core.need import peak_blocks
from vllm.errors import ConfigError
from vllm.worker.memory import count_useful_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeCache:
    """What one layer type has.

    Attributes:
        block_tokens: tokens of a block; 0 for a type without a cache.
        num_blocks: blocks that it can have while no other type takes superblocks.
        views: layer -> its tensors, as in LayerCache.
    """

    block_tokens: int = 0
    num_blocks: int = 0
    views: Mapping[int, tuple[Tensor, ...]]


def cut_groups(
    groups: Sequence[KVCacheGroup],
    specs: Iterable[LayerCacheSpec],
    block_size_map: Mapping[str, int],
    *,
    kernel_block_tokens: Sequence[int],
    uncached_types: Sequence[str],
) -> tuple[KVCacheGroup, ...]:
    """Return the groups with blocks of the sizes that a map asks for; others stay as they are.

    Args:
        groups: as they are now.
        specs: of all layers.
        block_size_map: layer type -> tokens of a block, 0 for none.
        kernel_block_tokens: sizes that the kernels of the layers take; empty takes any.
        uncached_types: types of modules that are no decoder layers.

    Raises:
        ConfigError: an unknown type, a size that no kernel takes, or no cache for a layer that
            needs one.
    """
    specs = tuple(specs)
    owned = {spec.layer: spec for spec in specs if spec.fields and spec.reads_from is None}
    known = sorted({spec.kind for spec in specs} | set(uncached_types))
    for kind, size in block_size_map.items():
        layers = [layer for layer, spec in owned.items() if spec.kind == kind]
        has_rows = any(not isinstance(owned[layer].lifetime, State | Nothing) for layer in layers)
        if kind not in known:
            raise ConfigError(
                f"block_size_map speaks of layer type {kind!r}, which this model does not have; "
                f"its types are {', '.join(map(repr, known))}"
            )
        if size == 0 and layers:
            raise ConfigError(
                f"block_size_map gives layer type {kind!r} no cache, but its layers {layers} keep "
                "one; give it the tokens of a block"
            )
        if size < 0 or (has_rows and kernel_block_tokens and size not in kernel_block_tokens):
            allowed = ", ".join(map(str, kernel_block_tokens)) or "any from 1"
            raise ConfigError(
                f"block_size_map gives layer type {kind!r} (layers {layers}) blocks of {size} "
                f"tokens; the kernels of its layers take {allowed}"
            )
    return tuple(
        make_group(
            group.name,
            [owned[layer] for layer in group.layers],
            block_size_map.get(owned[group.layers[0]].kind, group.block_tokens),
        )
        for group in groups
    )


def describe_types(
    groups: Sequence[KVCacheGroup],
    num_blocks: Sequence[int],
    caches: Sequence[LayerCache | None],
    specs: Iterable[LayerCacheSpec],
    uncached_types: Sequence[str],
) -> dict[str, TypeCache]:
    """Return what each layer type has; the stripes and lifetimes of one type are joined.

    Args:
        groups: all of them.
        num_blocks: blocks that each group can have.
        caches: views of each layer.
        specs: of all layers.
        uncached_types: types of modules that are no decoder layers.
    """
    kinds = {spec.layer: spec.kind for spec in specs}
    found = {kind: TypeCache(views={}) for kind in (*kinds.values(), *uncached_types)}
    for group, count in zip(groups, num_blocks, strict=True):
        kind = kinds[group.layers[0]]
        before = found[kind]
        bound = {layer: caches[layer] for layer in group.layers}
        views = {layer: cache.tensors for layer, cache in bound.items() if cache is not None}
        found[kind] = TypeCache(
            block_tokens=group.block_tokens,
            num_blocks=min(count, before.num_blocks) if before.views else count,
            views={**before.views, **views},
        )
    return found


def count_hybrid_bytes(
    groups: Sequence[KVCacheGroup],
    *,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> int:
    """Return what `max_num_seqs` sequences of `max_model_len` tokens fill, and room to keep more.

    Groups that forget (windows, states) get the same again for checkpoints of the prefix cache,
    whose rows no running sequence holds.
    """
    peaks = peak_blocks(make_block_managers(groups), max_model_len, max_num_batched_tokens)
    whole = [-(-max_model_len // group.block_tokens) for group in groups]
    total = 0
    for group, peak, all_blocks in zip(groups, peaks, whole, strict=True):
        is_state = isinstance(group.lifetime, State)
        num_blocks = 2 * peak if is_state else min(2 * peak, max(peak, all_blocks))
        total += count_useful_bytes(
            block_bytes=group.block_bytes,
            block_tokens=1,  # sequences are counted in blocks here
            max_num_seqs=max_num_seqs,
            max_model_len=num_blocks,
        )
    return total
