"""The kernel `cpu`: the compiled paged attention of `csrc/cpu`, one op for prefill and decode.

Reads cached rows through strided offsets and the rows of this step from K/V as computed. What is
checked and computed is in `vllm._custom_ops`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from vllm._custom_ops.attention import paged_attention
from vllm._custom_ops.cache import reshape_and_cache
from vllm.attention.backends.abstract import (
    GATHERED_FIELDS,
    AttentionBackend,
    AttentionParams,
    KernelQuery,
    Rule,
    find_refusal,
    judge_heads,
    serve_any,
)
from vllm.batch import ForwardBatch, LayerCache
from vllm.types import DType

_DTYPES = (DType.FLOAT32, DType.BFLOAT16)
_RULES: dict[str, Rule] = {
    "num_heads": judge_heads,
    "head_size": lambda q: (
        (32 <= q.head_size <= 640 and q.head_size % 8 == 0)
        or f"head_size={q.head_size} is outside 32...640 in steps of 8"
    ),
    "dtype": lambda q: q.dtype in _DTYPES,
    "kv_dtype": lambda q: (
        q.kv_dtype == q.dtype or f"kv_dtype={q.kv_dtype.value} differs from dtype={q.dtype.value}"
    ),
    "device": lambda q: q.device == "cpu",
    "capability": lambda q: q.capability is None,
    **serve_any(*GATHERED_FIELDS),
}


class CpuBackend(AttentionBackend):
    """Attention by the compiled CPU ops."""

    name: ClassVar[str] = "cpu"

    def supports(self, query: KernelQuery) -> str | None:
        """Serves float32 and bfloat16, head sizes 32 to 640 in steps of 8, every mask."""
        return find_refusal(query, _RULES)

    def forward(
        self,
        out_THD: Tensor,
        query_THD: Tensor,
        key_THD: Tensor | None,
        value_THD: Tensor | None,
        cache: LayerCache,
        batch: ForwardBatch,
        plan: Any,
        params: AttentionParams,
        *,
        rows_are_cached: bool = False,
    ) -> None:
        """See `AttentionBackend.forward`."""
        key_cache, value_cache = cache.tensors[0], cache.tensors[-1]
        group = batch.groups[cache.group]
        is_written = rows_are_cached or not params.writes_cache
        if not is_written and key_THD is not None and value_THD is not None:
            reshape_and_cache(key_THD, value_THD, key_cache, value_cache, group.slots)
        paged_attention(
            out_THD,
            query_THD,
            key_cache,
            value_cache,
            group.block_offsets,
            batch.cu_query_lens,
            batch.seq_lens,
            params.scale,
            window=params.window,
            soft_cap=params.soft_cap,
            sinks=params.sinks,
            sink_tokens=params.sink_tokens,
            chunk_tokens=params.chunk_tokens,
            fresh_key_THD=key_THD,
            fresh_value_THD=value_THD,
        )
