"""What backends share whose kernel wants the K and V of prompts in one piece.

Cached rows and new ones are gathered behind each other; decode rows go to our own kernel, which
pages. `flash_attn.py`, `flash_attn3.py` and `xformers.py` add the call of their package. The places
are made once a step for each window, on the host from host numbers.
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm.attention.backends.abstract import (
    AttentionBackend,
    AttentionParams,
    KernelQuery,
    Rule,
    find_refusal,
    judge_heads,
    serve_any,
)
from vllm.attention.backends.triton import (
    attend_decode_rows,
    judge_capability,
    judge_device,
    store_new_rows,
)
from vllm.batch import ForwardBatch, LayerCache
from vllm.types import DType

_DTYPES = (DType.FLOAT16, DType.BFLOAT16)


def _judge_decode(query: KernelQuery) -> bool | str:
    verdict = judge_device(query)
    if verdict is not True or importlib.util.find_spec("triton") is not None:
        return verdict
    return "its decode rows need Triton, which is not installed"


def make_rules(max_head_size: int, *served: str) -> dict[str, Rule]:
    """Return the rules of a package's kernel: causal attention, and the fields of `served`."""
    return {
        "num_heads": judge_heads,
        "head_size": lambda q: (
            (q.head_size <= max_head_size and q.head_size % 8 == 0)
            or f"head_size={q.head_size} is not a multiple of 8 up to {max_head_size}"
        ),
        "dtype": lambda q: q.dtype in _DTYPES,
        "kv_dtype": lambda q: q.kv_dtype == q.dtype,
        "device": _judge_decode,
        "capability": judge_capability,
        **serve_any("num_kv_heads", "scale", "block_tokens", *served),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """Where the K and V rows that prompts see come from, in the order of the gathered tensor.

    Attributes:
        units, inside: int64 [C], the cache places of cached rows; `to_cached` int64 [C] where they
            go. All None if nothing is cached.
        to_fresh: int64 [T], where the new rows go.
        cu_query_lens, cu_key_lens: int32 [prompts + 1].
        query_lens, key_lens: the same on the host.
    """

    units: Tensor | None
    inside: Tensor | None
    to_cached: Tensor | None
    to_fresh: Tensor
    cu_query_lens: Tensor
    cu_key_lens: Tensor
    query_lens: list[int]
    key_lens: list[int]

    def gather(self, cache: Tensor, fresh_THD: Tensor) -> Tensor:
        """Return the K or V rows of all prompts, [sum of key lengths, Hkv, D]."""
        if self.units is None or self.inside is None or self.to_cached is None:
            return fresh_THD
        rows = fresh_THD.new_empty(sum(self.key_lens), *fresh_THD.shape[1:])
        rows[self.to_cached] = cache[self.units, self.inside]
        rows[self.to_fresh] = fresh_THD
        return rows


@dataclass(slots=True, kw_only=True)
class ContiguousPlan:
    """What the layers of a step share: lengths, and the rows for each window that was asked for."""

    new_lens: list[int]
    computed_lens: list[int]
    rows: dict[int, PromptRows] = field(default_factory=dict)


class ContiguousBackend(AttentionBackend):
    """Prompts by the kernel of a package, decode rows by ours.

    Attributes:
        rules: what `attend_prompts` and our decode kernel both serve.
    """

    rules: ClassVar[Mapping[str, Rule]]

    def supports(self, query: KernelQuery) -> str | None:
        """See `AttentionBackend.supports`."""
        return find_refusal(query, self.rules)

    def plan(self, batch: ForwardBatch, group: int) -> ContiguousPlan:
        """See `AttentionBackend.plan`; waits for the device if the batch does not say lengths."""
        first = batch.num_decode_rows
        if first == batch.seq_lens.shape[0]:
            return ContiguousPlan(new_lens=[], computed_lens=[])
        if batch.new_lens_cpu:
            new, computed = list(batch.new_lens_cpu), list(batch.computed_lens_cpu)
        else:
            new = batch.cu_query_lens.diff().tolist()
            computed = [s - n for s, n in zip(batch.seq_lens.tolist(), new, strict=True)]
        return ContiguousPlan(new_lens=new[first:], computed_lens=computed[first:])

    @abstractmethod
    def attend_prompts(
        self,
        query_THD: Tensor,
        key_SHD: Tensor,
        value_SHD: Tensor,
        rows: PromptRows,
        params: AttentionParams,
    ) -> Tensor:
        """Attend from the new tokens of each prompt to its rows, the new ones last; [T, H, D]."""

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
        attend_decode_rows(out_THD, query_THD, cache, batch, params)
        if not plan.new_lens:
            return
        prompts = slice(batch.num_decode_rows, None)
        if params.window not in plan.rows:
            plan.rows[params.window] = plan_rows(plan, batch, cache.group, params.window)
        rows = plan.rows[params.window]
        if key_THD is None or value_THD is None:
            places = batch.groups[cache.group].slots[prompts].long()
            key, value = (
                c[places[:, 0], places[:, 1]] for c in (cache.tensors[0], cache.tensors[-1])
            )
        else:
            key, value = key_THD[prompts], value_THD[prompts]
        out_THD[prompts] = self.attend_prompts(
            query_THD[prompts],
            rows.gather(cache.tensors[0], key),
            rows.gather(cache.tensors[-1], value),
            rows,
            params,
        )


def plan_rows(plan: ContiguousPlan, batch: ForwardBatch, group: int, window: int) -> PromptRows:
    """Find the rows that prompts see under a window; none before it is read, freed ones least."""
    device = batch.seq_lens.device
    new = np.array(plan.new_lens, dtype=np.int64)
    computed = np.array(plan.computed_lens, dtype=np.int64)
    skipped = np.maximum(computed - window + 1, 0) if window else np.zeros_like(computed)
    kept = computed - skipped
    key_starts = _accumulate(kept + new)
    query_starts = _accumulate(new)

    def place(values: NDArray[np.int64], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(values).to(device, dtype)

    units = inside = to_cached = None
    if kept.any():
        ramp = np.arange(kept.sum()) - np.repeat(_accumulate(kept)[:-1], kept)
        positions = ramp + np.repeat(skipped, kept)
        table = batch.groups[group]
        rows = place(np.repeat(np.arange(len(new)), kept) + batch.num_decode_rows)
        units = table.block_offsets[rows, place(positions // table.block_tokens)].long()
        inside = place(positions % table.block_tokens)
        to_cached = place(ramp + np.repeat(key_starts[:-1], kept))
    fresh_ramp = np.arange(new.sum()) - np.repeat(query_starts[:-1], new)
    return PromptRows(
        units=units,
        inside=inside,
        to_cached=to_cached,
        to_fresh=place(fresh_ramp + np.repeat(key_starts[:-1] + kept, new)),
        cu_query_lens=place(query_starts, torch.int32),
        cu_key_lens=place(key_starts, torch.int32),
        query_lens=new.tolist(),
        key_lens=(kept + new).tolist(),
    )


def _accumulate(lens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0 and the running sums."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lens)))
