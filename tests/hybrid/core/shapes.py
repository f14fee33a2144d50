"""Small cache groups of every lifetime, and random mixes of them, for the tests of hybrid cores."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.core.builders import full_group
from vllm.cache_spec import (
    CacheField,
    Chunk,
    KVCacheGroup,
    LayerCacheSpec,
    Lifetime,
    State,
    Window,
    make_group,
)
from vllm.types import DType


def token_group(
    name: str, lifetime: Lifetime, *, block_tokens: int = 4, layer: int = 1
) -> KVCacheGroup:
    """A group that keeps some rows of one layer."""
    row = CacheField(name="k", shape=(16,), dtype=DType.FLOAT32)
    spec = LayerCacheSpec(layer=layer, fields=(row,), lifetime=lifetime, kind=name)
    return make_group(name, [spec], block_tokens)


def state_group(name: str = "state", *, layer: int = 2) -> KVCacheGroup:
    """A group of one layer with a recurrent state and the tail of a convolution."""
    fields = (
        CacheField(name="conv", shape=(8, 3), dtype=DType.BFLOAT16, per="sequence"),
        CacheField(name="state", shape=(2, 8, 8), dtype=DType.FLOAT32, per="sequence"),
    )
    spec = LayerCacheSpec(layer=layer, fields=fields, lifetime=State(), kind=name)
    return make_group(name, [spec], 4)


def draw_window(rng: random.Random, layer: int = 1) -> KVCacheGroup:
    """A window with a width around the edges of blocks, grains and whole prompts."""
    lifetime = Window(tokens=rng.choice([1, 3, 5, 8, 9, 17, 40, 1000]), sinks=rng.choice([0, 0, 3]))
    return token_group(f"window{layer}", lifetime, block_tokens=rng.choice([2, 4, 8]), layer=layer)


def draw_chunk(rng: random.Random) -> KVCacheGroup:
    """A chunk with a length around the edges of blocks and grains."""
    lifetime = Chunk(tokens=rng.choice([1, 5, 8, 12, 16, 33, 1000]))
    return token_group("chunk", lifetime, block_tokens=rng.choice([2, 4, 8]), layer=3)


def draw_groups(rng: random.Random) -> list[KVCacheGroup]:
    """A random mix of lifetimes, as hybrid families have them."""
    full = full_group("full", block_tokens=rng.choice([2, 4, 8]))
    mixes: Sequence[Sequence[KVCacheGroup]] = (
        [full, draw_window(rng)],
        [full, state_group()],
        [full, state_group()],
        [state_group(), draw_window(rng), full],
        [draw_window(rng)],
        [draw_window(rng, 4), draw_window(rng)],
        [state_group()],
        [full, state_group("state.0"), state_group("state.1", layer=5)],
        [full, draw_chunk(rng)],
        [draw_chunk(rng)],
        [state_group(), draw_window(rng)],
        [full, draw_window(rng), draw_chunk(rng), state_group()],
    )
    return list(rng.choice(mixes))
