"""The kernel `triton`: our paged attention on a GPU, split decode and tiled prefill.

Whole prompts of equal length go to cuDNN (`_custom_ops/triton/cudnn.py`) where Hopper's own kernel
(`_custom_ops/triton/attention_hopper.py`), which is faster, does not serve. All decisions are made
on the host from host numbers; nothing waits for the device.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from vllm._custom_ops.cache import reshape_and_cache
from vllm._custom_ops.triton import cudnn
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
from vllm.attention.backends.long_prompts import (
    plan_chunks,
    plan_joined,
)
from vllm.batch import ForwardBatch, LayerCache
from vllm.types import DType

if TYPE_CHECKING:
    from vllm._custom_ops.triton.attention_args import ChunkRows, JoinedRows

OLDEST_CAPABILITY = (8, 0)

_DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


def judge_device(query: KernelQuery) -> bool | str:
    """Rule of `device`: a GPU that this torch can use."""
    if query.device != "cuda":
        return False
    return torch.cuda.is_available() or "this torch sees no CUDA device"


def judge_capability(query: KernelQuery) -> bool | str:
    """Rule of `capability`: Ampere or later."""
    if query.capability is not None and query.capability >= OLDEST_CAPABILITY:
        return True
    return f"capability {query.capability} is below {OLDEST_CAPABILITY}"


_RULES: dict[str, Rule] = {
    "num_heads": judge_heads,
    "head_size": lambda q: (
        (8 <= q.head_size <= 640 and q.head_size % 8 == 0)
        or f"head_size={q.head_size} is outside 8...640 in steps of 8"
    ),
    "dtype": lambda q: q.dtype in _DTYPES,
    "kv_dtype": lambda q: (
        q.kv_dtype == q.dtype or f"kv_dtype={q.kv_dtype.value} differs from dtype={q.dtype.value}"
    ),
    "device": judge_device,
    "capability": judge_capability,
    **serve_any(*GATHERED_FIELDS),
}


@dataclass(slots=True, kw_only=True)
class TritonPlan:
    """What the layers of a step share.

    Attributes:
        are_prompts_whole: whether the rows beyond the decode rows have no computed tokens.
        prompt_len: the length of each of them if they are whole and equal, else 0.
        chunks: those with few new tokens at a long end, or None.
        joined: what the others see of their sequences, for each (window, bytes of a row, whether
            new rows are joined).
    """

    are_prompts_whole: bool
    prompt_len: int
    chunks: ChunkRows | None
    joined: dict[tuple[int, int, bool], JoinedRows | None] = dataclasses.field(default_factory=dict)

    def join(
        self, batch: ForwardBatch, window: int, cache: LayerCache, *, has_new: bool = True
    ) -> JoinedRows | None:
        """Return what the rows see of their sequences under a window, or None; see JoinedRows."""
        field = cache.tensors[0]
        row_bytes = math.prod(field.shape[2:]) * field.element_size() * len(cache.tensors)
        key = (window, row_bytes, has_new)
        if key not in self.joined:
            self.joined[key] = plan_joined(batch, window, row_bytes, self.chunks, has_new=has_new)
        return self.joined[key]


class TritonBackend(AttentionBackend):
    """Attention by our Triton kernels."""

    name: ClassVar[str] = "triton"

    def supports(self, query: KernelQuery) -> str | None:
        """Serves every mask, head sizes 8 to 640 in steps of 8, on Ampere and later."""
        return find_refusal(query, _RULES)

    def plan(self, batch: ForwardBatch, group: int) -> TritonPlan:
        """See `AttentionBackend.plan`."""
        first = batch.num_decode_rows
        new_lens, computed = batch.new_lens_cpu[first:], batch.computed_lens_cpu[first:]
        is_whole = bool(new_lens) and not any(computed)
        is_equal = is_whole and min(new_lens) == max(new_lens)
        chunks = None if is_whole else plan_chunks(batch)
        return TritonPlan(
            are_prompts_whole=is_whole,
            prompt_len=new_lens[0] if is_equal else 0,
            chunks=chunks,
        )

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
        store_new_rows(key_THD, value_THD, cache, batch, params, rows_are_cached)
        # Triton may be absent where this file is imported to be asked what it serves.
        from vllm._custom_ops.triton.attention import attend  # noqa: PLC0415
        from vllm._custom_ops.triton.attention_hopper import can_attend  # noqa: PLC0415

        args = _make_args(out_THD, query_THD, key_THD, value_THD, cache, batch, params)
        is_hoppers = batch.max_query_len > 1 and can_attend(args)
        is_torchs = (
            not is_hoppers
            and cudnn.is_length_served(plan.prompt_len)
            and is_plain(params)
            and cudnn.serves_rows(query_THD, key_THD, value_THD)
        )
        if is_torchs:
            assert key_THD is not None and value_THD is not None
            attend_decode_rows(out_THD, query_THD, cache, batch, params)
            prompts = slice(batch.num_decode_rows, None)
            cudnn.attend_equal_prompts(
                out_THD[prompts],
                query_THD[prompts],
                key_THD[prompts],
                value_THD[prompts],
                plan.prompt_len,
                params.scale,
            )
            return
        has_cached_prompts = any(batch.computed_lens_cpu[batch.num_decode_rows :])
        joined = None
        if has_cached_prompts:
            joined = plan.join(batch, params.window, cache, has_new=not is_hoppers)
        attend(
            args,
            num_decode_rows=batch.num_decode_rows,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            are_decodes_cached=True,  # see `attend_decode_rows`
            are_prompts_whole=plan.are_prompts_whole,
            chunks=plan.chunks,
            joined=joined,
        )


def store_new_rows(
    key_THD: Tensor | None,
    value_THD: Tensor | None,
    cache: LayerCache,
    batch: ForwardBatch,
    params: AttentionParams,
    rows_are_cached: bool,
) -> None:
    """Write this step's K/V rows into the cache, if the layer stores them and nobody has."""
    if rows_are_cached or not params.writes_cache or key_THD is None or value_THD is None:
        return
    slots = batch.groups[cache.group].slots
    reshape_and_cache(key_THD, value_THD, cache.tensors[0], cache.tensors[-1], slots)


def attend_decode_rows(
    out_THD: Tensor,
    query_THD: Tensor,
    cache: LayerCache,
    batch: ForwardBatch,
    params: AttentionParams,
) -> None:
    """Attend for the leading rows with one new token; the others are not touched.

    Their new rows of K and V are in the cache, by this layer or the one that it reads.
    """
    if batch.num_decode_rows == 0:
        return
    from vllm._custom_ops.triton.attention_decode import decode_attention  # noqa: PLC0415

    args = _make_args(out_THD, query_THD, None, None, cache, batch, params)
    args.check()
    decode_attention(args, batch.num_decode_rows, batch.max_seq_len)


def is_plain(params: AttentionParams) -> bool:
    """Whether a layer's attention is causal and nothing else."""
    return (
        params.window == params.chunk_tokens == 0 and not params.soft_cap and params.sinks is None
    )


def _make_args(
    out_THD: Tensor,
    query_THD: Tensor,
    key_THD: Tensor | None,
    value_THD: Tensor | None,
    cache: LayerCache,
    batch: ForwardBatch,
    params: AttentionParams,
) -> Any:
    from vllm._custom_ops.triton.attention_args import AttentionArgs  # noqa: PLC0415

    return AttentionArgs(
        out=out_THD,
        query=query_THD,
        key_cache=cache.tensors[0],
        value_cache=cache.tensors[-1],
        block_offsets=batch.groups[cache.group].block_offsets,
        cu_query_lens=batch.cu_query_lens,
        seq_lens=batch.seq_lens,
        scale=params.scale,
        window=params.window,
        soft_cap=params.soft_cap,
        sinks=params.sinks,
        sink_tokens=params.sink_tokens,
        chunk_tokens=params.chunk_tokens,
        fresh_key=key_THD,
        fresh_value=value_THD,
    )
