"""Triton twins of `_custom_ops/attention.py`, and the entry that knows more than an op is told.

The ops are registered for CUDA tensors by `table.py`. `attend` is called by the backend
`triton`, which knows on the host which rows have one new token and how long rows are at most.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vllm._custom_ops.triton.attention_args import AttentionArgs, ChunkRows, JoinedRows
from vllm._custom_ops.triton.attention_decode import chunk_attention, decode_attention
from vllm._custom_ops.triton.attention_hopper import can_attend
from vllm._custom_ops.triton.attention_join import can_join, join_rows
from vllm._custom_ops.triton.attention_prefill import prefill_attention
from vllm._custom_ops.triton.attention_shape import split_head
from vllm._custom_ops.triton.cudnn import (
    attend_equal_prompts,
    is_length_served,
    serves_rows,
)


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
    """See the door. Rows with one new token are told from others on the device."""
    num_tokens, num_rows = query_THD.shape[0], seq_lens.shape[0]
    if num_tokens == 0 or num_rows == 0:
        return
    args = AttentionArgs(
        out=out_THD,
        query=query_THD,
        key_cache=key_cache,
        value_cache=value_cache,
        block_offsets=block_offsets_BN,
        cu_query_lens=cu_query_lens,
        seq_lens=seq_lens,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        sink_tokens=sink_tokens,
        chunk_tokens=chunk_tokens,
        fresh_key=fresh_key_THD,
        fresh_value=fresh_value_THD,
    )
    args.check()
    longest = block_offsets_BN.shape[1] * key_cache.shape[1] + num_tokens
    decode_attention(args, num_rows, longest)
    if num_tokens > 1:
        prefill_attention(args, 0, num_rows, num_tokens, min_query_len=2)


def attend(
    args: AttentionArgs,
    *,
    num_decode_rows: int,
    max_query_len: int,
    max_seq_len: int,
    are_decodes_cached: bool = False,
    are_prompts_whole: bool = False,
    chunks: ChunkRows | None = None,
    joined: JoinedRows | None = None,
) -> None:
    """Attend for all rows of a batch.

    Args:
        args: the op's arguments.
        num_decode_rows: leading rows with one new token; of padded steps, room for them.
        max_query_len: no row has more new tokens.
        max_seq_len: no row is longer.
        are_decodes_cached: the new rows of K and V of the leading rows are in the cache too; read
            from there they cost a kernel fewer instructions.
        are_prompts_whole: the other rows have nothing in the cache that their new rows lack.
        chunks: rows that are split over their keys, or None.
        joined: what the remaining rows see, to be laid behind each other first, or None.
    """
    args.check()
    num_rows = args.seq_lens.shape[0]
    if num_decode_rows > 0:
        cached = args.without_fresh() if are_decodes_cached else args
        decode_attention(cached, num_decode_rows, max_seq_len)
    if chunks is not None:
        chunk_attention(args, chunks.rows, chunks.max_query_len, chunks.max_seq_len)
    num_prompts = num_rows - num_decode_rows
    if num_prompts == 0 or (chunks is not None and chunks.are_all):
        return
    if are_prompts_whole and args.fresh_key is not None:
        args = replace(args, key_cache=None, value_cache=None, block_offsets=None)
    elif joined is not None and can_join(args):
        args = join_rows(args, joined, num_decode_rows, num_prompts)
    least = 1 if chunks is None else chunks.most_tokens + 1
    prefill_attention(args, num_decode_rows, num_prompts, max_query_len, min_query_len=least)


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
    """See the door."""
    args = AttentionArgs(
        out=out_THD,
        query=query_THD,
        key_cache=None,
        value_cache=None,
        block_offsets=None,
        cu_query_lens=cu_query_lens,
        seq_lens=(cu_query_lens if cu_key_lens is None else cu_key_lens).diff(),
        scale=scale,
        window=0,
        soft_cap=0.0,
        sinks=None,
        sink_tokens=0,
        chunk_tokens=0,
        fresh_key=key_THD,
        fresh_value=value_THD,
        cu_key_lens=cu_key_lens,
    )
    is_torchs = is_length_served(equal_len) and serves_rows(query_THD, key_THD, value_THD)
    if is_torchs and not can_attend(args):
        attend_equal_prompts(out_THD, query_THD, key_THD, value_THD, equal_len, scale)
        return
    head_size, value_size = query_THD.shape[2], value_THD.shape[2]
    if value_size not in (head_size, split_head(head_size)[0]):  # a size that no tile has
        whole = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
        padded = torch.nn.functional.pad(value_THD, (0, head_size - value_size))
        prompt_attention(
            whole, query_THD, key_THD, padded, cu_query_lens, max_query_len, scale, cu_key_lens
        )
        out_THD.copy_(whole[:, :, :value_size])
        return
    args.check()
    prefill_attention(args, 0, args.seq_lens.shape[0], max_query_len, min_query_len=1)


OPS = {"paged_attention": paged_attention, "prompt_attention": prompt_attention}
SCHEMAS = {
    "prompt_attention": (
        "prompt_attention(Tensor(a!) out, Tensor query, Tensor key, Tensor value, "
        "Tensor cu_query_lens, int max_query_len, float scale, "
        "Tensor? cu_key_lens=None, int equal_len=0) -> ()"
    ),
}
