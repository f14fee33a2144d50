"""Doors of attention: over a paged cache for prefill, decode and anything between; within prompts.

Called by `attention/backends/cpu.py` and `layers/mla.py`. Naive twins:
`_custom_ops/naive/attention.py`. The kernels check their arguments; nothing here computes. On a CPU
the result of a row depends on that row alone, bit for bit: not on the batch, the chunk, or whether
a key comes from the cache or is fresh.
"""

from __future__ import annotations

from torch import Tensor

from vllm._custom_ops.library import C


def paged_attention(
    out_THD: Tensor,
    query_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_offsets_BN: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    sink_tokens: int = 0,
    chunk_tokens: int = 0,
    fresh_key_THD: Tensor | None = None,
    fresh_value_THD: Tensor | None = None,
) -> None:
    """Attend from the new tokens of each row to what they may see of that row.

    Row b's queries stand at positions seq_lens[b] - q … seq_lens[b] - 1. Position p sees
    p - W + 1 … p (window W > 0), p // c * c … p (chunk c > 0) or 0 … p, and always the first
    `sink_tokens` rows up to p. Whatever is not seen is never read, or selected away: NaN there does
    not leak.

    Args:
        out_THD: like `query_THD`; overwritten.
        query_THD: float32 or bfloat16 (on a GPU float16 too) [T, H, D], D a multiple of 8 up to
            640, contiguous in D.
        key_cache: [num_units, block_tokens, Hkv, D] view, stride(0) = 256 bytes.
        value_cache: same.
        block_offsets_BN: int32; (b, i) is the unit in which positions i * block_tokens … of row b
            lie.
        cu_query_lens: int32 [B + 1].
        seq_lens: int32 [B], computed and new tokens.
        scale: factor of the logits.
        window: W above; 0 is none.
        soft_cap: c > 0 turns a scaled logit x into c * tanh(x / c).
        sinks: float32 [H], a logit that joins each softmax with no value.
        sink_tokens: first rows that stay visible whatever the window or the chunk.
        chunk_tokens: c above; 0 is none.
        fresh_key_THD: [T, Hkv, D]; new tokens' rows are read from here instead of the cache.
        fresh_value_THD: same; both or none.

    Raises:
        ShapeError: an argument has the wrong shape, stride, dtype or value.

    Cost: reads each visible K and V row once for every 96 / (H / Hkv) new tokens of its row.
    """
    C.paged_attention(
        out_THD,
        query_THD,
        key_cache,
        value_cache,
        block_offsets_BN,
        cu_query_lens,
        seq_lens,
        scale,
        window,
        soft_cap,
        sinks,
        sink_tokens,
        chunk_tokens,
        fresh_key_THD,
        fresh_value_THD,
    )


def prompt_attention(
    out_THD: Tensor,
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    cu_query_lens: Tensor,
    max_query_len: int,
    scale: float,
    cu_key_lens: Tensor | None = None,
    equal_len: int = 0,
) -> None:
    """Attend causally to rows that lie behind each other, not in a cache; GPUs only.

    Args:
        out_THD: [T, H, V]; overwritten.
        query_THD: float32, float16 or bfloat16 [T, H, D], D a multiple of 8 up to 640, contiguous
            in D.
        key_THD: [T, Hkv, D].
        value_THD: [T, Hkv, V], V at most D.
        cu_query_lens: int32 [B + 1].
        max_query_len: no prompt is longer.
        scale: factor of the logits.
        cu_key_lens: int32 [B + 1] where a row has more keys than queries, which are its last ones;
            then K and V are [sum of key lengths, ...].
        equal_len: the length of every row if they are equal and have no other keys, else 0.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.prompt_attention(
        out_THD,
        query_THD,
        key_THD,
        value_THD,
        cu_query_lens,
        max_query_len,
        scale,
        cu_key_lens,
        equal_len,
    )
