"""Attention in plain PyTorch: the twins of `_custom_ops/attention.py`.

Read by tests and by anyone who wants to know what the ops mean. Never called by the engine.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


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
    """Gather each row's keys and values, mask, softmax in float32, sum."""
    group = query_THD.shape[1] // key_cache.shape[2]
    for row, seq_len in enumerate(seq_lens.tolist()):
        begin, end = cu_query_lens[row : row + 2].tolist()
        start = seq_len - (end - begin)
        keys, values = (
            _gather_rows(cache, block_offsets_BN[row], start, seq_len, fresh, begin, end)
            for cache, fresh in ((key_cache, fresh_key_THD), (value_cache, fresh_value_THD))
        )
        visible = _visible(start, seq_len, window, sink_tokens, chunk_tokens)
        dead = ~visible.any(0)
        keys, values = (x.float().masked_fill(dead[:, None, None], 0.0) for x in (keys, values))
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        logits = torch.einsum("qhd,khd->hqk", query_THD[begin:end].float(), keys) * scale
        if soft_cap > 0:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        logits = logits.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sink = sinks[:, None, None].expand(-1, end - begin, 1)
            weights = torch.softmax(torch.cat((logits, sink), -1), -1)[..., :-1]
        else:
            weights = torch.softmax(logits, -1)
        out_THD[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out_THD.dtype)


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
    """Attend within each row, causally, the queries last; softmax in float32."""
    group = query_THD.shape[1] // key_THD.shape[1]
    bounds = cu_query_lens.tolist()
    key_bounds = bounds if cu_key_lens is None else cu_key_lens.tolist()
    for (begin, end), (first, last) in zip(pairwise(bounds), pairwise(key_bounds), strict=True):
        key, value = (
            x[first:last].float().repeat_interleave(group, 1) for x in (key_THD, value_THD)
        )
        logits = torch.einsum("qhd,khd->hqk", query_THD[begin:end].float(), key) * scale
        is_seen = torch.ones_like(logits[0], dtype=torch.bool).tril(last - first - end + begin)
        weights = torch.softmax(logits.masked_fill(~is_seen, float("-inf")), -1)
        out_THD[begin:end] = torch.einsum("hqk,khd->qhd", weights, value).to(out_THD.dtype)


def _gather_rows(
    cache: Tensor,
    offsets: Tensor,
    start: int,
    seq_len: int,
    fresh: Tensor | None,
    begin: int,
    end: int,
) -> Tensor:
    """Return the K or V rows of positions 0 … seq_len - 1, [seq_len, Hkv, D]."""
    positions = torch.arange(seq_len if fresh is None else start)
    block_tokens = cache.shape[1]
    rows = cache[offsets.long()[positions // block_tokens], positions % block_tokens]
    return rows if fresh is None else torch.cat((rows, fresh[begin:end]))


def _visible(start: int, seq_len: int, window: int, sink_tokens: int, chunk_tokens: int) -> Tensor:
    """Return which keys each new position sees, bool [q, seq_len]."""
    position = torch.arange(start, seq_len)[:, None]
    key = torch.arange(seq_len)[None, :]
    seen = torch.ones(seq_len - start, seq_len, dtype=torch.bool)
    if window > 0:
        seen &= key > position - window
    if chunk_tokens > 0:
        seen &= key >= position // chunk_tokens * chunk_tokens
    return (seen | (key < sink_tokens)) & (key <= position)
