"""Cache geometries of published hybrid models, as numbers: what each layer keeps, in bytes.

Bfloat16 rows; states of linear attention and Mamba in float32 or bfloat16, as the model has them.
One tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm.cache_spec import (
    CacheField,
    Full,
    KVCacheGroup,
    LayerCacheSpec,
    Lifetime,
    State,
    Window,
)
from vllm.config.hybrid import HybridSettings
from vllm.hybrid.grouping import group_layers
from vllm.types import DType

Layer = tuple[str, Lifetime, tuple[CacheField, ...]]

BF16, FP32 = DType.BFLOAT16, DType.FLOAT32


def attention(heads: int, size: int, lifetime: Lifetime | None = None) -> Layer:
    """Keys and values of a layer."""
    fields = tuple(CacheField(name=name, shape=(heads, size), dtype=BF16) for name in "kv")
    lifetime = lifetime or Full()
    return ("full" if lifetime == Full() else "window", lifetime, fields)


def latent(rank: int, rope: int) -> Layer:
    """The compressed row of multi-head latent attention."""
    return ("full", Full(), (CacheField(name="latent", shape=(rank + rope,), dtype=BF16),))


def recurrent(state: tuple[int, ...], channels: int, width: int, dtype: DType = FP32) -> Layer:
    """A recurrent state and the last inputs of its convolution."""
    fields = (
        CacheField(name="conv", shape=(channels, width - 1), dtype=BF16, per="sequence"),
        CacheField(name="state", shape=state, dtype=dtype, per="sequence"),
    )
    return ("state", State(), fields)


def short_conv(channels: int, width: int) -> Layer:
    """The last inputs of a short convolution."""
    tail = CacheField(name="conv", shape=(channels, width - 1), dtype=BF16, per="sequence")
    return ("state", State(), (tail,))


def delta_net(key_heads: int, value_heads: int, size: int, dtype: DType = FP32) -> Layer:
    """A gated delta net with heads of `size` for keys and values."""
    return recurrent((value_heads, size, size), (2 * key_heads + value_heads) * size, 4, dtype)


def mamba2(heads: int, head_size: int, state_size: int, num_groups: int = 1) -> Layer:
    """A Mamba-2 layer."""
    return recurrent(
        (heads, head_size, state_size), heads * head_size + 2 * num_groups * state_size, 4
    )


def repeat(num_layers: int, every: int, last: Layer, others: Layer) -> list[Layer]:
    """Every `every`-th layer is `last`, the rest are `others`."""
    return [last if (i + 1) % every == 0 else others for i in range(num_layers)]


def some(first: int, one: Layer, second: int, other: Layer) -> list[Layer]:
    """So many layers of one kind and so many of another."""
    return [one] * first + [other] * second


def gemma3_4b() -> list[Layer]:
    """34 layers, 5 of them full, windows of 1,024."""
    return repeat(34, 6, attention(4, 256), attention(4, 256, Window(tokens=1024)))


def qwen3_next_80b() -> list[Layer]:
    """48 layers, 12 of them full, the others gated delta nets with float32 states."""
    return repeat(48, 4, attention(2, 256), delta_net(16, 32, 128))


GEOMETRIES: dict[str, Callable[[], list[Layer]]] = {
    "qwen2-7b": lambda: [attention(4, 128)] * 28,
    "gemma3-4b": gemma3_4b,
    "qwen2-hybrid": lambda: some(16, attention(8, 128), 16, attention(8, 128, Window(tokens=2048))),
    "qwen3-next-small": lambda: repeat(24, 4, attention(2, 256), delta_net(16, 32, 128)),
    "nemotron-h-8b": lambda: some(4, attention(8, 128), 24, mamba2(128, 64, 128, 8)),
    "deepseek-v2-lite": lambda: [latent(512, 64)] * 27,
    "qwen3-next-80b": qwen3_next_80b,
    "qwen3-next-80b bf16 state": lambda: repeat(
        48, 4, attention(2, 256), delta_net(16, 32, 128, BF16)
    ),
    "qwen3.5-35b": lambda: repeat(40, 4, attention(2, 256), delta_net(16, 32, 128)),
    "qwen3.5-27b": lambda: repeat(64, 4, attention(4, 256), delta_net(16, 48, 128)),
    "qwen3.5-9b": lambda: repeat(32, 4, attention(4, 256), delta_net(16, 32, 128)),
    "kimi-linear-48b": lambda: some(7, latent(512, 64), 20, delta_net(32, 32, 128)),
    "nemotron-3-nano": lambda: some(6, attention(2, 128), 23, mamba2(64, 64, 128, 8)),
    "granite-4-h-small": lambda: some(4, attention(8, 128), 36, mamba2(128, 64, 64)),
    "bamba-9b": lambda: some(3, attention(8, 128), 29, mamba2(128, 64, 64)),
    "falcon-h1-34b": lambda: some(72, attention(4, 128), 72, mamba2(32, 128, 256, 2)),
    "jamba-mini": lambda: some(4, attention(8, 128), 28, recurrent((8192, 16), 8192, 4, BF16)),
    "lfm2-1.2b": lambda: some(6, attention(8, 64), 10, short_conv(2048, 3)),
    "gemma3-27b": lambda: some(10, attention(16, 128), 52, attention(16, 128, Window(tokens=1024))),
    "gpt-oss-20b": lambda: some(12, attention(8, 64), 12, attention(8, 64, Window(tokens=128))),
}


def make_groups(layers: list[Layer], block_tokens: int = 16) -> tuple[KVCacheGroup, ...]:
    """Return the cache groups of a model, as the engine makes them."""
    specs = [
        LayerCacheSpec(layer=i, fields=fields, lifetime=lifetime, kind=kind)
        for i, (kind, lifetime, fields) in enumerate(layers)
    ]
    return group_layers(specs, HybridSettings(), block_tokens)
