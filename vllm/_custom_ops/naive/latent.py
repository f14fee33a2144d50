"""The ops of latent attention's rows in plain PyTorch: the twins of `_custom_ops/latent.py`.

Read by tests and by anyone who wants to know what the ops mean. Never called by the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm._custom_ops.naive.cache import reshape_and_cache
from vllm._custom_ops.naive.norm import rms_norm
from vllm._custom_ops.naive.rope import rotary_embedding


def latent_norm_rope_cache(
    row_TD: Tensor,
    query_THR: Tensor,
    turned_THR: Tensor,
    positions: Tensor,
    slots_T2: Tensor,
    cache: Tensor,
    weight: Tensor,
    epsilon: float,
    cos_sin: Tensor,
    is_neox: bool,
) -> None:
    """Norm the latents, turn what is behind them and the queries, write the rows."""
    latent, size = weight.shape[0], query_THR.shape[2]
    rms_norm(row_TD[:, :latent], row_TD[:, :latent], weight, epsilon)
    turned_THR.copy_(query_THR)
    rotary_embedding(positions, turned_THR, row_TD[:, None, latent:], size, cos_sin, is_neox)
    row_T1D = row_TD[:, None]
    reshape_and_cache(row_T1D, row_T1D, cache, cache, slots_T2)


def latent_keys(key_THD: Tensor, made_THX: Tensor, row_TD: Tensor, rope: int) -> None:
    """Copy both parts."""
    nope = key_THD.shape[2] - rope
    key_THD[:, :, :nope] = made_THX[:, :, :nope]
    key_THD[:, :, nope:] = row_TD[:, None, -rope:]


def join_latents(
    joined_SD: Tensor,
    row_TD: Tensor,
    cache: Tensor,
    block_offsets_BN: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    cu_key_lens: Tensor,
    max_key_len: int,
) -> None:
    """Gather each sequence's rows and copy the last of them."""
    block_tokens = cache.shape[1]
    for i, seq_len in enumerate(seq_lens.tolist()):
        begin, end = cu_query_lens[i : i + 2].tolist()
        first, last = cu_key_lens[i : i + 2].tolist()
        positions = torch.arange(seq_len - end + begin)
        units = block_offsets_BN[i].long()[positions // block_tokens]
        rows = torch.cat((cache[units, positions % block_tokens, 0], row_TD[begin:end]))
        joined_SD[first:last] = rows[len(rows) - last + first :]
