"""PagedAttention: the metadata of a step and the dispatch of each layer to its kernel.

The model runner calls `plan` once a step; attention layers call `forward`. Which kernel serves a
layer was decided by the selector at load time; nothing is chosen here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm.attention.backends.abstract import AttentionParams
from vllm.attention.backends.table import load_backend, rank_kernels
from vllm.batch import AttentionState, ForwardBatch, LayerCache


class PagedAttention:
    """Attention over a paged cache, one kernel a layer."""

    @staticmethod
    def plan(
        batch: ForwardBatch, kernels: Iterable[tuple[int, str]]
    ) -> Mapping[tuple[int, str], Any]:
        """Let every (group, kernel) in use prepare its metadata for this batch."""
        return {key: load_backend(key[1]).plan(batch, key[0]) for key in kernels}

    @staticmethod
    def prepare(
        batch: ForwardBatch,
        kernels: Sequence[tuple[int, str]],
        caches: tuple[LayerCache | None, ...],
    ) -> AttentionState:
        """Return what the layers need for this batch, and for those behind its cuts."""
        inner = None if batch.cut is None else batch.cut.batch
        return AttentionState(
            caches=caches,
            plans=PagedAttention.plan(batch, kernels),
            behind_cut=None if inner is None else PagedAttention.prepare(inner, kernels, caches),
        )

    @staticmethod
    def forward(
        query_THD: Tensor,
        key_THD: Tensor | None,
        value_THD: Tensor | None,
        cache: LayerCache,
        batch: ForwardBatch,
        plans: Mapping[tuple[int, str], Any],
        params: AttentionParams,
        layer_impl: str | None = None,
        *,
        rows_are_cached: bool = False,
    ) -> Tensor:
        """Write the new K/V into the cache and attend with the layer's kernel.

        Args:
            query_THD: [T, H, D].
            key_THD: new keys [T, Hkv, D], or None if the layer reads another's cache.
            value_THD: new values, same.
            cache: the layer's views of the arena.
            batch: the step.
            plans: what `plan` returned for this batch.
            params: the layer's constants.
            layer_impl: kernel name of this layer; None takes the first choice of the device.
            rows_are_cached: the new K/V are in the cache already; only attend.

        Returns:
            [T, H, D], dtype of the query.
        """
        name = layer_impl or rank_kernels(query_THD.device.type)[0]
        make = torch.zeros_like if batch.has_spare_tokens else torch.empty_like
        out_THD = make(query_THD, memory_format=torch.contiguous_format)
        plan = plans.get((cache.group, name))
        load_backend(name).forward(
            out_THD,
            query_THD,
            key_THD,
            value_THD,
            cache,
            batch,
            plan,
            params,
            rows_are_cached=rows_are_cached,
        )
        return out_THD
