"""The attention module of one decoder layer.

Built by models; states what the layer keeps (`spec`) and what it asks of a kernel (`query`), and
runs the kernel that the worker bound to it. Holds no cache and no batch: both come as arguments.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from vllm.attention.backends.abstract import AttentionParams, KernelQuery
from vllm.attention.backends.long_prompts import MAX_JOINED_BYTES
from vllm.attention.backends.paged_attn import PagedAttention
from vllm.batch import AttentionState, ForwardBatch
from vllm.cache_spec import CacheField, Chunk, LayerCacheSpec, Lifetime, Window
from vllm.types import DType


class Attention(nn.Module):
    """Attention of one layer over this rank's heads.

    Args:
        layer: index of the decoder layer.
        num_heads, num_kv_heads: heads of this rank.
        scale: factor of the logits.
        lifetime: what the layer keeps; `Full` everywhere in the vanilla engine, whatever the mask.
        dtype: element type of query, key and value.
        cache_dtype: element type of the cache; None is `dtype`.
        window, sink_tokens, chunk_tokens, soft_cap: the mask and the cap, as in KernelQuery.
        sinks: float32 [num_heads], learned sink logits, or None.
        reads_from: layer whose cache this one reads instead of keeping its own.
        kind: name of the layer type.
        layer_impl: kernel that the user wants for this layer; None is the engine's choice.

    Attributes:
        kernel: name of the bound kernel, None before `bind`.
    """

    def __init__(
        self,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        lifetime: Lifetime,
        *,
        dtype: DType,
        cache_dtype: DType | None = None,
        window: int = 0,
        sink_tokens: int = 0,
        chunk_tokens: int = 0,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        reads_from: int | None = None,
        kind: str = "full",
        layer_impl: str | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.layer_impl = layer_impl
        self.kernel: str | None = None
        kv_dtype = cache_dtype or dtype
        self.spec = LayerCacheSpec(
            layer=layer,
            fields=_make_fields(num_kv_heads, head_size, kv_dtype) if reads_from is None else (),
            lifetime=lifetime,
            kind=kind,
            reads_from=reads_from,
        )
        self.params = AttentionParams(
            scale=scale,
            window=window,
            sink_tokens=sink_tokens,
            chunk_tokens=chunk_tokens,
            soft_cap=soft_cap,
            sinks=sinks,
            writes_cache=reads_from is None,
        )
        self.query = KernelQuery(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            scale=scale,
            window=window,
            sink_tokens=sink_tokens,
            has_sink_logits=sinks is not None,
            chunk_tokens=chunk_tokens,
            soft_cap=soft_cap,
        )

    def limit(self, lifetime: Lifetime, kind: str, layer_impl: str | None) -> None:
        """Let the cache keep what `lifetime` says, and see no more than that.

        Args:
            lifetime: of the cache; a window narrows the mask that the layer has already.
            kind: name of the layer type.
            layer_impl: kernel that the user wants for this layer, or None.
        """
        if isinstance(lifetime, Window):
            window = min(self.params.window or lifetime.tokens, lifetime.tokens)
            sinks = lifetime.sinks
            self.params = replace(self.params, window=window, sink_tokens=sinks)
            self.query = replace(self.query, window=window, sink_tokens=sinks)
        elif isinstance(lifetime, Chunk):
            self.params = replace(self.params, chunk_tokens=lifetime.tokens)
            self.query = replace(self.query, chunk_tokens=lifetime.tokens)
        self.spec = replace(self.spec, lifetime=lifetime, kind=kind)
        self.layer_impl = layer_impl or self.layer_impl

    def bind(self, kernel: str) -> None:
        """Fix the kernel that serves this layer (the worker's job, once, after loading)."""
        self.kernel = kernel

    def count_scratch_bytes(self, max_keys: int, max_new_tokens: int) -> int:
        """Return what lies beside the cache while prompts attend to what is cached of them.

        See `attention/backends/long_prompts.py`.

        Args:
            max_keys: most tokens that the prompts of a step have together, cached ones counted.
            max_new_tokens: most new tokens of a step.
        """
        return min(self.spec.token_bytes * max_keys, MAX_JOINED_BYTES)

    def forward(
        self,
        query_THD: Tensor,
        key_THD: Tensor | None,
        value_THD: Tensor | None,
        batch: ForwardBatch,
        attention: AttentionState,
        *,
        rows_are_cached: bool = False,
    ) -> Tensor:
        """Write this step's K/V and attend.

        Args:
            query_THD: [T, num_heads, head_size].
            key_THD: [T, num_kv_heads, head_size]. A layer with `reads_from` is given the rows of
                the layer that it reads, or None where that one stores every token.
            value_THD: same.
            batch: the step.
            attention: caches of all layers and plans of all kernels.
            rows_are_cached: this step's K/V are in the cache already; only attend.

        Returns:
            [T, num_heads, head_size].
        """
        cache = attention.caches[self.layer]
        assert cache is not None, f"layer {self.layer} has no cache bound to it"
        return PagedAttention.forward(
            query_THD,
            key_THD,
            value_THD,
            cache,
            batch,
            attention.plans,
            self.params,
            layer_impl=self.kernel,
            rows_are_cached=rows_are_cached,
        )


def _make_fields(num_kv_heads: int, head_size: int, dtype: DType) -> tuple[CacheField, ...]:
    return tuple(
        CacheField(name=name, shape=(num_kv_heads, head_size), dtype=dtype) for name in ("k", "v")
    )
