"""The kernel `torch`: plain PyTorch, the oracle of the other kernels.

Gathers each row's cached K/V, masks exactly and computes in float32. Right on every device, slow on
all. Shares no code with the naive twins of the compiled ops, so that each can check the other.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

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
from vllm.batch import ForwardBatch, GroupBatch, LayerCache
from vllm.types import DType

_DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
_RULES: dict[str, Rule] = {
    "num_heads": judge_heads,
    "dtype": lambda q: q.dtype in _DTYPES,
    "kv_dtype": lambda q: q.kv_dtype in _DTYPES,
    "device": lambda q: q.device in ("cpu", "cuda"),
    **serve_any("head_size", "capability", *GATHERED_FIELDS),
}


class TorchBackend(AttentionBackend):
    """Attention in plain PyTorch, one row at a time."""

    name: ClassVar[str] = "torch"
    is_capturable: ClassVar[bool] = False

    def supports(self, query: KernelQuery) -> str | None:
        """Serves everything that a mask can express, in any float type."""
        return find_refusal(query, _RULES)

    def plan(self, batch: ForwardBatch, group: int) -> tuple[list[int], list[int]]:
        """Return cumulative query lengths and sequence lengths as host lists."""
        return batch.cu_query_lens.tolist(), batch.seq_lens.tolist()

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
            _write_rows(key_cache, key_THD, group)
            _write_rows(value_cache, value_THD, group)
        cu_query_lens, seq_lens = plan
        for row, seq_len in enumerate(seq_lens):
            start, stop = cu_query_lens[row], cu_query_lens[row + 1]
            if start == stop:
                continue
            out_THD[start:stop] = attend_row(
                query_THD[start:stop],
                _gather_rows(key_cache, group, row, seq_len, key_THD, (start, stop)),
                _gather_rows(value_cache, group, row, seq_len, value_THD, (start, stop)),
                params,
            )


def _write_rows(cache: Tensor, rows_THD: Tensor, group: GroupBatch) -> None:
    slots = group.slots.long()
    is_kept = slots[:, 0] >= 0
    cache[slots[is_kept, 0], slots[is_kept, 1]] = rows_THD[is_kept].to(cache.dtype)


def _gather_rows(
    cache: Tensor,
    group: GroupBatch,
    row: int,
    seq_len: int,
    fresh_THD: Tensor | None,
    span: tuple[int, int],
) -> Tensor:
    """Return the rows of one sequence, [seq_len, Hkv, D]: cached ones, then those of this step."""
    start, stop = span
    num_cached = seq_len if fresh_THD is None else seq_len - (stop - start)
    num_blocks = -(-num_cached // group.block_tokens)
    blocks = group.block_offsets[row, :num_blocks].long()
    cached = cache[blocks].flatten(0, 1)[:num_cached]
    if fresh_THD is None:
        return cached
    return torch.cat((cached, fresh_THD[start:stop].to(cache.dtype)))


def attend_row(
    query_THD: Tensor, key_SHD: Tensor, value_SHD: Tensor, params: AttentionParams
) -> Tensor:
    """Attend T new tokens to the S tokens of their sequence, the T new ones last.

    Args:
        query_THD: [T, H, D].
        key_SHD: [S, Hkv, D]; rows that no query may see can hold anything, NaN included.
        value_SHD: same.
        params: the layer's constants.

    Returns:
        [T, H, D], float32.
    """
    num_new, num_heads, _ = query_THD.shape
    seq_len, num_kv_heads, _ = key_SHD.shape
    visible_TS = make_mask(num_new, seq_len, params, query_THD.device)
    is_live_S = visible_TS.any(dim=0)
    key = torch.where(is_live_S[:, None, None], key_SHD.float(), 0.0)
    value = torch.where(is_live_S[:, None, None], value_SHD.float(), 0.0)
    repeats = num_heads // num_kv_heads
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    logits_HTS = torch.einsum("thd,shd->hts", query_THD.float(), key) * params.scale
    if params.soft_cap:
        logits_HTS = params.soft_cap * torch.tanh(logits_HTS / params.soft_cap)
    logits_HTS = logits_HTS.masked_fill(~visible_TS, float("-inf"))
    if params.sinks is not None:
        sinks_HT1 = params.sinks.float()[:, None, None].expand(num_heads, num_new, 1)
        weights_HTS = torch.cat((logits_HTS, sinks_HT1), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights_HTS = logits_HTS.softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights_HTS, value)


def make_mask(num_new: int, seq_len: int, params: AttentionParams, device: torch.device) -> Tensor:
    """Return bool [num_new, seq_len]: which keys each of the last `num_new` positions sees."""
    query = torch.arange(seq_len - num_new, seq_len, device=device)[:, None]
    key = torch.arange(seq_len, device=device)[None, :]
    is_near = torch.ones(num_new, seq_len, dtype=torch.bool, device=device)
    if params.window:
        is_near &= key > query - params.window
    if params.chunk_tokens:
        is_near &= key >= query // params.chunk_tokens * params.chunk_tokens
    return (is_near | (key < params.sink_tokens)) & (key <= query)
