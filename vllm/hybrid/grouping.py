"""Several cache groups from the specs of the layers.

Called by engine/core.py in place of the base's single group. Layers of one kind (the user's name)
and one lifetime share a block table; a layer that reads another's cache belongs to none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm.cache_spec import KVCacheGroup, LayerCacheSpec, Lifetime, Nothing, make_group
from vllm.errors import ConfigError
from vllm.hybrid.assign import LayerPolicy

MAX_STRIPE_BYTES = 64 << 20


def group_layers(
    specs: Sequence[LayerCacheSpec],
    policies: Sequence[LayerPolicy],
    default_block_tokens: int,
    kernel_block_tokens: Sequence[int],
) -> tuple[KVCacheGroup, ...]:
    """Return one group for each (kind, lifetime), in the order of their first layers.

    Args:
        specs: what each decoder layer keeps, lifetimes already those of the policies.
        policies: what the user and the checkpoint ask for.
        default_block_tokens: block size where the user names none.
        kernel_block_tokens: block sizes that the kernels take.

    Raises:
        ConfigError: a block size that no kernel takes.
    """
    members: dict[tuple[str, Lifetime], list[LayerCacheSpec]] = {}
    sizes: Mapping[str, int | None] = {p.kind: p.block_tokens for p in policies}
    for spec, policy in zip(specs, policies, strict=True):
        if spec.reads_from is None and spec.fields and not isinstance(spec.lifetime, Nothing):
            members.setdefault((policy.kind, spec.lifetime), []).append(spec)
    groups: list[KVCacheGroup] = []
    for (kind, _), owned in members.items():
        tokens = sizes[kind] or default_block_tokens
        if tokens not in kernel_block_tokens:
            raise ConfigError(
                f"layer type {kind!r} is given blocks of {tokens} tokens; the kernels of its "
                f"layers take {', '.join(map(str, kernel_block_tokens))}."
            )
        groups += _stripe(kind, owned, tokens)
    return tuple(groups)


def _stripe(kind: str, specs: list[LayerCacheSpec], block_tokens: int) -> list[KVCacheGroup]:
    """Cut a group whose block is larger than a superblock may be into subsets of its layers."""
    whole = make_group(kind, specs, block_tokens)
    if whole.block_bytes <= MAX_STRIPE_BYTES or len(specs) == 1:
        return [whole]
    num_stripes = min(len(specs), -(-whole.block_bytes // MAX_STRIPE_BYTES))
    bounds = [len(specs) * i // num_stripes for i in range(num_stripes + 1)]
    return [
        make_group(f"{kind}.{i}", specs[bounds[i] : bounds[i + 1]], block_tokens)
        for i in range(num_stripes)
    ]
